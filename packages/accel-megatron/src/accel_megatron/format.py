"""An engine in a checkpoint: the files of `megatron.core.dist_checkpointing`, which the manifest lists.

megatron-core decides which rank writes which piece, and can load the folder on any number of ranks. It is a checkpoint
of `torch.distributed.checkpoint` with two more files: the values that are equal on all ranks, and the name of the
format.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_core.checkpoint import pickles
from accel_core.checkpoint.format import FilePart, Part, Run, SaveRequest, Source
from accel_core.checkpoint.plain import PlainFormat
from accel_core.checkpoint.report import Finding, Restoration, finding_of, listed
from accel_core.errors import CheckpointError
from accel_megatron import library
from accel_megatron.engine import MegatronEngine
from accel_parallel.checkpoint import models as stored_models
from accel_parallel.checkpoint import writer
from accel_parallel.checkpoint.metadata import METADATA_NAME
from accel_parallel.checkpoint.reader import ShardFolder

_FOLDER = "pytorch_model_megatron"
_COMMON = "common.pt"
_BACKEND = ("torch_dist", 1)
_STATE = re.compile(r"^optimizer\.state\.\w+\.")

_CONTENT = {
    # Optimizer states are laid out like their weights, so that any degrees can load them.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""How megatron-core lays out a checkpoint."""


class EngineFormat(PlainFormat):
    """An engine in megatron-core's own files."""

    has_models_apart = False

    def weights(self, run: Run) -> list[dict[str, Any]]:
        """Return no weights: no rank holds a whole engine."""
        return []

    def parts(self, request: SaveRequest) -> list[Part]:
        """Return what this rank writes; see `CheckpointFormat.parts`."""
        found: list[Part] = []
        rank = request.run.world.rank
        for engine in _engines(request.run.models):
            shards, common = _planned(engine)
            found += writer.plan({_FOLDER: shards}, rank, request.exchange, _planner)
            found += [FilePart(f"{_FOLDER}/{name}", "bytes", content) for name, content in common.items()]
            found.append(FilePart(_random_name(rank), "object", _generators().get_states()))
        return found

    def recognises(self, source: Source) -> bool:
        """Return true: `model_restorations` reports any other checkpoint as one that an engine cannot load."""
        return True

    def files_of(self, source: Source, rank: int, size: int) -> Iterable[str]:
        """Return all files except the random states of other ranks."""
        own = _random_name(rank)
        return [name for name in source.files() if name == own or not name.startswith(f"{_FOLDER}/random_")]

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare the checkpoint with the engine, without changing it, and return how to restore it."""
        return [_restoration(engine, source, run.world.rank) for engine in _engines(models)]

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Return an empty list: an engine restores its optimizer with its model."""
        return [Restoration(f"optimizer {index}") for index, _ in enumerate(run.optimizers)]


def _random_name(rank: int) -> str:
    return f"{_FOLDER}/random_{rank}.pt"


def _generators() -> Any:
    """Return megatron-core's own random generators, which draw dropout."""
    return library.core("tensor_parallel.random").get_cuda_rng_tracker()


def _engines(models: Iterable[Any]) -> list[MegatronEngine]:
    return [model for model in models if isinstance(model, MegatronEngine)]


def _bare(chunk: nn.Module) -> nn.Module:
    """Return a part of a model without its wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _named(engine: MegatronEngine) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a model under Megatron-LM's names in a checkpoint."""
    several = len(engine.module) > 1
    for index, chunk in enumerate(engine.module):
        yield (f"model{index}" if several else "model"), _bare(chunk)


def _state(engine: MegatronEngine, *, optimizer: bool, loading: bool) -> dict[str, Any]:
    """Return what megatron-core saves of an engine, or loads into it; every rank calls it."""
    weights = {name: chunk.sharded_state_dict(metadata=dict(_CONTENT)) for name, chunk in _named(engine)}
    state: dict[str, Any] = dict(weights)
    if optimizer and engine.optimizer is not None:
        whole = weights.get("model", weights)
        state["optimizer"] = engine.optimizer.sharded_state_dict(whole, is_loading=loading, metadata=dict(_CONTENT))
    return state


def _planned(engine: MegatronEngine) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the values of an engine by their names among shards, and the small files that rank 0 writes."""
    # Before the first step, the optimizer has no state to save.
    state = _state(engine, optimizer=engine.iteration > 0 and not engine.plugin.no_save_optim, loading=False)
    state |= engine.progress()
    strategies = library.core("dist_checkpointing.strategies.torch")
    catching = _catching()  # megatron-core plans the shards, accel writes them: all files are in its manifest
    with tempfile.TemporaryDirectory() as folder:
        library.core("dist_checkpointing").save(
            state, folder, sharded_strategy=catching, content_metadata=dict(_CONTENT)
        )
        common = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    shards, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(catching.caught, True)
    return strategies.mcore_to_pyt_state_dict(shards, False), common


def _catching() -> Any:
    """Return a megatron-core save strategy that keeps the values instead of writing them."""
    base = library.core("dist_checkpointing.strategies.base").SaveShardedStrategy

    class Catching(base):  # type: ignore[misc, valid-type]
        can_handle_sharded_objects = True

        def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: object) -> None:
            self.caught = sharded_state_dict

    return Catching(*_BACKEND)


def _planner() -> Any:
    return library.core("dist_checkpointing.strategies.torch").MCoreSavePlanner(flatten_state_dict=False)


def _restoration(engine: MegatronEngine, source: Source, rank: int) -> Restoration:
    component = "model 0"
    if f"{_FOLDER}/{METADATA_NAME}" not in source.files():
        detail = f"the checkpoint has no Megatron folder {_FOLDER!r}, and an engine can only be loaded from one"
        return Restoration(component, findings=[Finding(component, "mismatch", detail, rank)])
    try:
        shards = stored_models.shards_of(source, _FOLDER)
        common = pickles.read_object(source.folder, f"{_FOLDER}/{_COMMON}")
        for name in shards.objects:  # megatron-core will unpickle these: refuse code
            shards.read(name)
        states = _random_states(engine, source, common, rank)
        findings = [*_differences(engine, shards, component, rank)]
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    findings += stored_models.damages(shards, source, component, rank)
    wants_optimizer = engine.optimizer is not None and not engine.plugin.no_load_optim
    stepped = common["iteration"] > 0
    problem = _other_optimizer(engine, common) if wants_optimizer and stepped else None
    if problem is not None:
        findings.append(Finding(component, "mismatch", problem, rank))

    def apply() -> None:
        _load(engine, source.folder / _FOLDER, optimizer=wants_optimizer and stepped)
        if wants_optimizer and not stepped:
            _begin_again(engine)
        engine.go_on_from(common)
        if states is not None:
            _generators().set_states(states)

    files = frozenset({*shards.files(), *(f"{_FOLDER}/{name}" for name in (_COMMON, "metadata.json"))})
    holds = {shards.file(file): held for file, held in shards.contents().items()}
    return Restoration(component, apply, findings, files=files, holds=holds)


def _random_states(engine: MegatronEngine, source: Source, common: Mapping[str, Any], rank: int) -> object:
    """Return the states of megatron-core's generators; `None` if the run had other degrees and drew differently."""
    name = _random_name(rank)
    # With other degrees, the random states belong to other ranks.
    if common["sizes"] != engine.progress()["sizes"] or name not in source.files():
        return None
    return pickles.read_object(source.folder, name)


def _tensors(engine: MegatronEngine) -> Iterator[Any]:
    """Yield what megatron-core loads into the weights of an engine, each the part that this rank holds."""
    mapping = library.core("dist_checkpointing.mapping")
    state = _state(engine, optimizer=False, loading=True)
    mapping.apply_factories(state)
    for one in library.core("dist_checkpointing.dict_utils").nested_values(state):
        if isinstance(one, mapping.ShardedTensor):
            yield one


def _differences(engine: MegatronEngine, shards: ShardFolder, component: str, rank: int) -> Iterator[Finding]:
    """Yield the parts of a model that are missing or have another shape."""
    wanted = {one.key: one for one in _tensors(engine)}
    missing = sorted(set(wanted) - set(shards.tensors))
    if missing:
        yield Finding(component, "missing", listed(missing), rank)
    for name in sorted(set(wanted) & set(shards.tensors)):
        own, stored = tuple(wanted[name].global_shape), tuple(shards.tensors[name].shape)
        if own != stored and not wanted[name].allow_shape_mismatch:
            yield Finding(component, "mismatch", f"{name} has shape {stored} and the model has {own}", rank)


def _other_optimizer(engine: MegatronEngine, common: Mapping[str, Any]) -> str | None:
    """Return why the saved optimizer state does not fit the optimizer of an engine, or `None`."""
    if "optimizer" not in common:
        return "it holds no optimizer state: set no_load_optim of MegatronLMPlugin to start with a new one"
    stored = "param_state_sharding_type" in common["optimizer"]
    own = bool(engine.plugin.use_distributed_optimizer)
    if stored == own:
        return None
    return f"it was saved with use_distributed_optimizer={stored}: set it so, or set no_load_optim of MegatronLMPlugin"


def _load(engine: MegatronEngine, folder: Path, *, optimizer: bool) -> None:
    """Load an engine from megatron-core's files, whichever degrees wrote them; every rank calls it."""
    if optimizer:
        for own in _adams(engine):
            _begin(own.optimizer)
            _take_steps(own)
    state = _state(engine, optimizer=optimizer, loading=True)
    loaded = library.core("dist_checkpointing").load(state, str(folder))
    for name, chunk in _named(engine):
        chunk.load_state_dict(loaded[name])  # megatron-core returns what it read, and loads nothing itself
    if optimizer:
        engine.optimizer.load_state_dict(loaded["optimizer"])
        for own in _adams(engine):
            _separate_steps(own.optimizer)
    elif engine.optimizer is not None:
        engine.optimizer.reload_model_params()  # its 32-bit masters still hold the old weights


def _adams(engine: MegatronEngine) -> Iterator[Any]:
    """Yield torch's optimizers that count the steps of each parameter separately."""
    for own in engine.optimizer.chained_optimizers:
        if isinstance(own.optimizer, torch.optim.Adam):
            yield own


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Create the states that an optimizer creates at its first step: megatron-core loads into existing states only."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _take_steps(own: Any) -> None:
    """Let a distributed optimizer load into torch's Adam: megatron-core restores its state without step counts."""
    put = getattr(own, "_set_main_param_and_optimizer_states", None)
    if put is None or "_set_main_param_and_optimizer_states" in vars(own):
        return

    def with_step(parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = own.model_param_group_index_map[parameter]
        main = own.optimizer.param_groups[group]["params"][order]
        put(parameter, {"step": own.optimizer.state[main]["step"], **tensors})

    own._set_main_param_and_optimizer_states = with_step


def _separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter its own step count: all would increment the one tensor that megatron-core loads."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _begin_again(engine: MegatronEngine) -> None:
    """Clear the states of an optimizer that was saved before its first step."""
    for own in engine.optimizer.chained_optimizers:
        if own.optimizer is not None:
            own.optimizer.state.clear()
