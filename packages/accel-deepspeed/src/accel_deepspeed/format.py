"""Engines in a checkpoint: DeepSpeed's own files, which the manifest lists like all others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from accel_core.checkpoint import model as stored_model
from accel_core.checkpoint import names
from accel_core.checkpoint.format import FilePart, Part, Run, SaveRequest, Source
from accel_core.checkpoint.model import StateOnlyModel
from accel_core.checkpoint.plain import PlainFormat
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.errors import CheckpointError
from accel_core.modules.unwrap import canonical_state_dict
from accel_deepspeed import resharding, states, whole
from accel_deepspeed.engines import Engine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import nn

_LATEST = "latest"
_OF_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_")


class EngineFormat(PlainFormat):
    """Stores engines in DeepSpeed's files, one part per rank, and models that are only evaluated as whole weights."""

    has_models_apart = False

    def __init__(self, engine_of: Callable[[Any], Engine | None], in_turn: bool) -> None:
        self._engine_of = engine_of
        self._in_turn = in_turn

    def weights(self, run: Run) -> list[dict[str, Any]]:
        """Return no weights: no rank holds a whole engine."""
        return []

    def parts(self, request: SaveRequest) -> list[Part]:
        """Return what this rank writes; see `CheckpointFormat.parts`."""
        kind: Literal["tensors", "object"] = "tensors" if request.safe else "object"
        found: list[Part] = []
        tags: list[str] = []
        for index, own in enumerate(request.run.models):
            if self._engine_of(own) is not None:
                tags.append(_tag(index))
                files = states.save_from(own, _tag(index))
                found += [FilePart(name, "object", content) for name, content in files.items()]
                continue
            # Every rank gathers, only the one that writes keeps.
            state = whole.state_of(own, keep=request.writes) if whole.is_sharded(own) else canonical_state_dict(own)
            if request.writes:
                found.append(FilePart(names.model_name(index, safe=request.safe), kind, state))
        if request.writes and tags:
            latest = FilePart(_LATEST, "bytes", tags[-1].encode())
            recovery = resources.files("deepspeed.utils").joinpath(states.RECOVERY)  # its script that joins weights
            found += [latest, FilePart(states.RECOVERY, "bytes", recovery.read_bytes())]
        return found

    def recognises(self, source: Source) -> bool:
        """Return true: `model_restorations` reports any other checkpoint as one that an engine cannot load."""
        return True

    def files_of(self, source: Source, rank: int, size: int) -> Iterable[str]:
        """Return all files, without other ranks' parts if as many ranks load as saved."""
        own = self._in_turn and source.world_size == size
        for name in source.files():
            found = _OF_RANK.search(name)
            if found is None or not own or int(found.group(1)) == rank:  # on other numbers of ranks, all parts are read
                yield name

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare the checkpoint with the models, without changing them, and return how to restore each."""
        found: list[Restoration] = []
        for index, own in enumerate(models):
            engine = self._engine_of(own)
            if engine is None:
                found.append(self._read_only(own, index, source, run.world.rank))
            else:
                found.append(self._trained(engine, index, source, run))
        return found

    def _trained(self, own: Engine, index: int, source: Source, run: Run) -> Restoration:
        component, rank, engine, tag = f"model {index}", run.world.rank, own.deepspeed, _tag(index)
        wanted = states.expected(engine, source.folder, tag)
        moves = bool(engine.zero_optimization_stage()) and source.world_size != run.world.size
        problem = _difference(engine, tag, wanted, source, moves)
        if problem is not None:
            return Restoration(component, findings=[Finding(component, "mismatch", problem, rank)])
        try:
            read = resharding.contents if moves else states.contents
            known = read(engine, source.folder, wanted)
        except (CheckpointError, OSError) as error:
            return Restoration(component, findings=[finding_of(error, component, rank)])

        def apply() -> None:
            with states.placeholders(known) if moves else nullcontext(source.folder) as folder:
                states.load_into(engine, folder, tag, known)
            own.zero_grad(None)  # gradients of the weights that were replaced

        there = [name for name in source.files() if name.startswith(f"{tag}/")]
        return Restoration(component, apply, files=frozenset(there if moves else wanted))

    def _read_only(self, own: nn.Module, index: int, source: Source, rank: int) -> Restoration:
        if not whole.is_sharded(own):
            return stored_model.restoration(own, index, source, rank)
        shown = StateOnlyModel(whole.state_of(own, keep=True))
        plan = stored_model.restoration(shown, index, source, rank)

        def apply() -> None:
            plan.apply()
            whole.load_into(own, shown.state)

        return replace(plan, apply=apply)

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Return an empty list: an engine restores its optimizer with its model."""
        return [Restoration(f"optimizer {index}") for index, _ in enumerate(run.optimizers)]


def _tag(index: int) -> str:
    """Return the folder name of the engine of model `index`, as in Accelerate."""
    return names.MODEL_NAME if index == 0 else f"{names.MODEL_NAME}_{index}"


def _difference(engine: DeepSpeedEngine, tag: str, wanted: Sequence[str], source: Source, moves: bool) -> str | None:
    """Return why an engine cannot be loaded from a folder, judged by file names, or `None`."""
    there = [name for name in source.files() if name.startswith(f"{tag}/")]
    stage = engine.zero_optimization_stage()
    if not there:
        return (
            f"the checkpoint has no DeepSpeed folder {tag!r}, and an engine of stage {stage} can only be loaded from "
            "one: load the model before prepare()"
        )
    if moves and whole.is_split(engine):
        return (
            f"{source.world_size} ranks saved it, and tensor-parallel layers cannot be resharded: load it on as many "
            "ranks"
        )
    # Without the rank: other numbers of ranks have other numbers of parts.
    missing = [name for name in wanted if _OF_RANK.sub("", name) not in {_OF_RANK.sub("", each) for each in there}]
    if missing or (stage == 0 and any("_optim_states" in name for name in there)):
        return (
            f"it was saved in another stage of ZeRO, and stage {stage} reads only {', '.join(wanted)}: set "
            "zero_optimization.stage to what it was"
        )
    return None
