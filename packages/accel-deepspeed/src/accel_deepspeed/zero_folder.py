"""The folder that DeepSpeed writes of an engine: what all ranks hold of it together, read without DeepSpeed.

What DeepSpeed's own program for this does, it does by running code from the files; here they are read as data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_core.checkpoint import pickles
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.tensor_file import SpreadWeight
from accel_core.errors import CheckpointDamagedError, CheckpointMismatchError
from accel_core.modules.unwrap import canonical_name
from accel_deepspeed import zero_layout
from accel_deepspeed.zero_layout import SHARDED_STAGE, Layout, Stretch

_MODEL, _OPTIMIZER = "_model_states.pt", "_optim_states.pt"
_NAME = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<slice>\d+)(?:_model|_optim)_states\.pt")
_SHOWN = 8


class _Plain:
    """Stands for an object of DeepSpeed that holds plain values, of which none is needed."""


_STAND_INS = [
    (_Plain, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Plain, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Plain, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def reader_of(folder: Path) -> Callable[[], Mapping[str, object]] | None:
    """Return what reads whole weights from a folder that DeepSpeed wrote for an engine, judged by file names."""
    return partial(_weights_in, folder) if any(name.endswith(_MODEL) for name in os.listdir(folder)) else None


def _weights_in(folder: Path) -> Mapping[str, object]:
    _refuse_damage(folder)
    return ZeroFolder(folder).weights()


class ZeroFolder:
    """What lies in the folder of an engine; tensors are mapped, and come into memory as they are used.

    Attributes:
        stage: Stage of ZeRO.
        ranks: Number of ranks among which its parts are shared.
        models: What each rank wrote of the model; all the same but in stage 3, where it is written once.
        optimizers: What each rank wrote of the optimizer; empty in stage 0.

    Raises:
        CheckpointDamagedError: A file is missing, damaged, not listed, or of another save than the others.
        CheckpointMismatchError: Layers are split over ranks by tensor parallel, or experts lie in files of their own.
        UnsafeCheckpointError: Reading would run code, or leads out of the folder.
    """

    def __init__(self, path: Path, classes: Sequence[Any] = _STAND_INS) -> None:
        self.path = path
        self._classes = list(classes)
        present = sorted(os.listdir(path))
        _refuse_split(path, present)
        found = {name: read for name in present if _NAME.fullmatch(name) and (read := self._read(name))}
        self.models = _in_turn(found, _MODEL)
        self.optimizers = [content["optimizer_state_dict"] for content in _in_turn(found, _OPTIMIZER)]
        self.stage = int(self.optimizers[0]["zero_stage"]) if self.optimizers else 0
        self.ranks = _count(self.optimizers)
        self._refuse_mixture(list(found))

    def _read(self, name: str) -> Any:
        with torch.serialization.safe_globals(self._classes):
            return pickles.read_object(self.path, name, links=True, mmap=True)

    def _refuse_mixture(self, present: Sequence[str]) -> None:
        """Refuse files that are not all of one save, as far as can be seen."""
        wanted = set(range(self.ranks)) if self.stage else set()
        parts = {
            int(match["rank"] or 0) for name in present if name.endswith(_OPTIMIZER) if (match := _NAME.match(name))
        }
        problems = [f"no part of rank {rank}" for rank in sorted(wanted - parts)]
        problems += [f"a part of rank {rank}, of {self.ranks}" for rank in sorted(parts - wanted)]
        models = self.ranks if self.stage == SHARDED_STAGE else 1
        if len(self.models) != models:
            problems.append(f"{len(self.models)} files of the model where {models} belong")
        for what, values in (
            ("stages of ZeRO", [int(each["zero_stage"]) for each in self.optimizers]),
            ("numbers of ranks", [_count([each]) for each in self.optimizers]),
            ("steps of the optimizer", [_steps(each) for each in self.optimizers]),
            ("steps of the engine", [each.get("global_steps") for each in self.models]),
        ):
            if any(value != values[0] for value in values):
                problems.append(f"{what} {', '.join(map(str, dict.fromkeys(values)))}")
        if problems:
            raise _mixture(self.path, problems)

    def flats(self, rank: int) -> list[Tensor]:
        """Return the fp32 weights of a rank, one flat tensor for each parameter group."""
        key = "fp32_flat_groups" if self.stage == SHARDED_STAGE else "single_partition_of_fp32_groups"
        return list(self.optimizers[rank][key])

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of what is trained, by group."""
        return [{name: tuple(shape) for name, shape in group.items()} for group in self.models[0]["param_shapes"] or ()]

    def layout(self) -> Layout:
        """Return where the values of what is trained lie.

        Raises:
            CheckpointDamagedError: The parts do not have the lengths that follow from the shapes.
        """
        found = layout_of(self.stage, self.ranks, self.shapes, self.optimizers[0])
        lengths = [[len(flat) for flat in self.flats(rank)] for rank in range(self.ranks)]
        for name, stretches in found.items():
            for each in stretches:
                if each.rank >= self.ranks or each.offset + each.size > lengths[each.rank][each.group]:
                    raise _mixture(self.path, [f"less than {name} needs"])
        return found

    def weights(self) -> dict[str, object]:
        """Return the whole state of the model by name, what lies in parts as weights that are read piece by piece."""
        if not self.stage:
            return {canonical_name(name): value for name, value in self.models[0]["module"].items()}
        shapes = {name: shape for group in self.shapes for name, shape in group.items()}
        layout = self.layout()
        shared = self.models[0].get("shared_params") or {}
        state: dict[str, object] = {}
        for name, value in self.models[0]["module"].items():
            first = shared.get(name, name)
            if canonical_name(first) in state:
                state[canonical_name(name)] = state[canonical_name(first)]
            elif first in shapes:
                state[canonical_name(name)] = self._spread(shapes[first], layout[first])
            else:
                state[canonical_name(name)] = self._untrained(first, value)
        for name, first in shared.items():
            state[canonical_name(name)] = state[canonical_name(first)]
        return state

    def _spread(self, shape: tuple[int, ...], stretches: Sequence[Stretch]) -> SpreadWeight:
        pieces = partial(self._pieces, stretches)
        return SpreadWeight(shape, torch.float, lambda: torch.cat([*pieces()]).reshape(shape), pieces)

    def _pieces(self, stretches: Sequence[Stretch]) -> Iterator[Tensor]:
        for each in stretches:
            yield self.flats(each.rank)[each.group].narrow(0, each.offset, each.size).float()

    def _untrained(self, name: str, value: object) -> Any:
        """Return a buffer, or a parameter that no optimizer trains."""
        shapes: Mapping[str, Sequence[int]] = self.models[0].get("frozen_param_shapes") or {}
        if name not in shapes:
            return value
        part = self.models[0]["frozen_param_fragments"][name]
        return SpreadWeight(tuple(shapes[name]), part.dtype, partial(self.frozen, name))

    def frozen(self, name: str) -> Tensor:
        """Return a parameter that no optimizer trains, put together from its parts."""
        shape = torch.Size(self.models[0]["frozen_param_shapes"][name])
        parts = [model["frozen_param_fragments"][name].flatten() for model in self.models]
        return torch.cat(parts)[: shape.numel()].reshape(shape)


def _refuse_damage(path: Path) -> None:
    """Refuse a folder in which a file is missing, damaged or not listed, if its checkpoint has a manifest."""
    manifest = Manifest.read(path.parent)
    if manifest is None:
        return
    prefix = f"{path.name}/"
    listed = {entry.name for entry in manifest.entries if entry.name.startswith(prefix)}
    problems = [f"{name.removeprefix(prefix)} {what}" for name, what in manifest.damages(path.parent, listed).items()]
    problems += [f"{name} is in no list" for name in sorted(os.listdir(path)) if prefix + name not in listed]
    if problems:
        raise _mixture(path, problems)


def _mixture(path: Path, problems: Sequence[str]) -> CheckpointDamagedError:
    more = " …" if len(problems) > _SHOWN else ""
    return CheckpointDamagedError(
        f"The files in {str(path)!r} are not those of one save of DeepSpeed; got "
        f"{'; '.join(problems[:_SHOWN])}{more}. Bring what all ranks saved, and only this, into the folder."
    )


def layout_of(stage: int, ranks: int, shapes: Sequence[Mapping[str, Sequence[int]]], part: Mapping[str, Any]) -> Layout:
    """Return where the values of what is trained lie among the parts of an optimizer."""
    if stage == SHARDED_STAGE:
        return zero_layout.of_parameters(shapes, ranks)
    flats = part["single_partition_of_fp32_groups"]
    lengths = [len(flat) + padding for flat, padding in zip(flats, part["group_paddings"], strict=True)]
    return zero_layout.of_groups(shapes, lengths, part.get("param_alignment_paddings"))


def _in_turn(found: Mapping[str, Any], ending: str) -> list[Any]:
    """Return the contents of files of one kind, by rank."""
    ranks = {int(match["rank"] or 0): name for name in found if name.endswith(ending) if (match := _NAME.match(name))}
    return [found[ranks[rank]] for rank in sorted(ranks)]


def _count(optimizers: Sequence[Mapping[str, Any]]) -> int:
    found = optimizers[0]["partition_count"] if optimizers else 1
    return max(found) if isinstance(found, list) else int(found)


def _steps(part: Mapping[str, Any]) -> object:
    """Return how often an optimizer stepped, by its own count."""
    base = part.get("base_optimizer_state") or part.get("optimizer_state_dict")
    states = base.get("state", {}) if isinstance(base, dict) else {}
    return next((int(state["step"]) for state in states.values() if "step" in state), None)


def _refuse_split(path: Path, present: Sequence[str]) -> None:
    """Refuse parts of layers, which only the model can put together."""
    split = [name for name in present if (match := _NAME.fullmatch(name)) and int(match["slice"])]
    split += [name for name in present if "expert" in name]
    if split:
        raise CheckpointMismatchError(
            "Layers that tensor parallel or experts split cannot be merged, only what ZeRO sharded; got parts of "
            f"{', '.join(split[:_SHOWN])} in {str(path)!r}. Load the checkpoint, and call save_model."
        )
