"""Converts a saved engine to another number of ranks.

DeepSpeed's own converter, `ds_to_universal`, cannot do it (0.19.8): it and what loads its files unpickle code, it knows
the states of Adam alone, in stage 3 it leaves frozen weights out, and there all groups of parameters get the learning
rate of the first. It also writes a second copy of everything before any rank can load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_core.errors import CheckpointMismatchError
from accel_deepspeed import states, zero_layout
from accel_deepspeed.zero_folder import ZeroFolder, layout_of
from accel_deepspeed.zero_layout import SHARDED_STAGE, Layout, Stretch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_OF_RUN = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""What an optimizer saves besides its parts, the same on all ranks."""

_Parts = Callable[[int, int], torch.Tensor]
"""Returns what a rank saved of a group."""


def contents(engine: DeepSpeedEngine, folder: Path, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the contents of the files of an engine for this rank, computed from what another number of ranks saved."""
    tag = wanted[0].partition("/")[0]
    saved = ZeroFolder(folder / tag, states.classes())
    problem = _difference(engine, saved)
    if problem is not None:
        raise CheckpointMismatchError(problem)
    group = engine.optimizer.dp_process_group
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    made = {False: _model_for(saved, rank, ranks), True: _optimizer_for(engine, saved, rank, ranks)}
    return {name: made["_optim_states" in name] for name in wanted}


def _difference(engine: DeepSpeedEngine, saved: ZeroFolder) -> str | None:
    """Return why the parts of other ranks cannot be combined for an engine, or `None`."""
    stage = engine.zero_optimization_stage()
    if stage != saved.stage and SHARDED_STAGE in (stage, saved.stage):
        return f"it was saved in ZeRO stage {saved.stage}, and this is stage {stage}: change zero_optimization.stage"
    if getattr(engine.optimizer, "swap_optimizer", False):
        return "an optimizer that is offloaded to nvme can only be loaded on as many ranks as saved it"
    if any(not isinstance(_base(part), dict) for part in saved.optimizers):
        return "its optimizer was saved with zero_optimization.elastic_checkpoint: load it on as many ranks as saved it"
    own = {name: tuple(shape) for group in engine._get_zero_param_shapes() for name, shape in group.items()}
    there = {name: shape for group in saved.shapes for name, shape in group.items()}
    wrong = [name for name in {**own, **there} if own.get(name) != there.get(name)]
    if wrong:
        shown = wrong[0]
        return f"it trains other parameters: {shown} is {there.get(shown)} there and {own.get(shown)} here"
    groups = len(_base(engine.optimizer.state_dict())["param_groups"]), len(_base(saved.optimizers[0])["param_groups"])
    if groups[0] != groups[1]:
        return f"its optimizer has {groups[1]} groups of parameters, and {groups[0]} here"
    return None


def _model_for(saved: ZeroFolder, rank: int, ranks: int) -> dict[str, Any]:
    """Return the content of the model file that a rank loads."""
    found = {**saved.models[0], "dp_world_size": ranks}
    frozen: Mapping[str, Any] = found.get("frozen_param_fragments") or {}
    if saved.stage == SHARDED_STAGE and frozen:
        found["frozen_param_fragments"] = {name: _frozen_part(saved, name, rank, ranks) for name in frozen}
    return found


def _frozen_part(saved: ZeroFolder, name: str, rank: int, ranks: int) -> torch.Tensor:
    values = saved.frozen(name).flatten()
    part = zero_layout.part_of(len(values), ranks)
    found = values.new_zeros(part)
    own = values[rank * part : (rank + 1) * part]
    found[: len(own)] = own
    return found


def _optimizer_for(engine: DeepSpeedEngine, saved: ZeroFolder, rank: int, ranks: int) -> dict[str, Any]:
    """Return the content of the optimizer file that a rank loads."""
    own = engine.optimizer.state_dict()
    shapes = engine._get_zero_param_shapes()
    target = layout_of(saved.stage, ranks, shapes, own)
    move = _Move(saved.layout(), target, rank)
    sharded = saved.stage == SHARDED_STAGE
    key = "fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"
    lengths = [len(flat) for flat in own[key]]
    padding = [0] * len(lengths) if sharded else own["group_paddings"]
    flats = [
        move.filled(group, torch.zeros(length), lambda rank, group: saved.flats(rank)[group])
        for group, length in enumerate(lengths)
    ]
    found = {
        group: _states_of(saved, move, group, sum(sizes))
        for group, sizes in enumerate(zip(lengths, padding, strict=True))
    }
    states = {group: state for group, state in found.items() if state}
    there = _base(saved.optimizers[0])["param_groups"]
    base = {
        "state": states,
        "param_groups": [
            {**one, "params": mine["params"]} for one, mine in zip(there, _base(own)["param_groups"], strict=True)
        ],
    }
    of_run = {name: saved.optimizers[0][name] for name in _OF_RUN if name in saved.optimizers[0]}
    content = {**own, **of_run, key: flats, _BASES[sharded]: base}
    return {"optimizer_state_dict": content, "ds_config": engine.config}


_BASES = {True: "optimizer_state_dict", False: "base_optimizer_state"}


def _base(part: Mapping[str, Any]) -> Any:
    """Return the state of torch's optimizer inside a ZeRO part."""
    return part[_BASES["fp32_flat_groups" in part]]


def _states_of(saved: ZeroFolder, move: _Move, group: int, length: int) -> dict[str, Any]:
    """Return the optimizer state of a group: per-element values are moved, the rest is the same for all ranks."""
    first = move.first_source(group)
    if first is None:
        return {}
    known: Mapping[str, Any] = _base(saved.optimizers[first.rank])["state"].get(first.group, {})
    found: dict[str, Any] = {}
    for name, value in known.items():
        if isinstance(value, torch.Tensor) and value.dim():
            found[name] = move.filled(group, value.new_zeros(length), partial(_state_of, saved, name))
        else:
            found[name] = value
    return found


def _state_of(saved: ZeroFolder, name: str, rank: int, group: int) -> torch.Tensor:
    found: torch.Tensor = _base(saved.optimizers[rank])["state"][group][name]
    return found


class _Move:
    """Moves values from the layout in which other ranks saved them to the layout of a rank now."""

    def __init__(self, source: Layout, target: Layout, rank: int) -> None:
        self._source = source
        self._target = target
        self._rank = rank

    def first_source(self, group: int) -> Stretch | None:
        """Return where the first values of a group are; `None` for an empty group."""
        names = (name for name, stretches in self._target.items() if stretches and stretches[0].group == group)
        return next((self._source[name][0] for name in names), None)

    def filled(self, group: int, found: torch.Tensor, parts: _Parts) -> torch.Tensor:
        """Return `found`, the part of a group, filled with the values of its parameters."""
        for name, stretches in self._target.items():
            for own in stretches:
                if (own.rank, own.group) == (self._rank, group):
                    whole = torch.cat([parts(e.rank, e.group).narrow(0, e.offset, e.size) for e in self._source[name]])
                    found.narrow(0, own.offset, own.size).copy_(whole.narrow(0, own.begin, own.size))
        return found
