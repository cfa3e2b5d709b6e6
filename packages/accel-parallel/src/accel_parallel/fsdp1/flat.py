"""States of a model that FSDP1 wraps, and of its optimizer, without a collective: ranks hold runs of elements.

With `use_orig_params`, a parameter is on each rank the run of its elements that lies in the rank's piece of a flattened
block, in the order of the ranks. So their lengths, which ranks tell each other, say where each begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_core.checkpoint.tensor_file import SpreadWeight
from accel_core.errors import CheckpointError
from accel_core.mesh.flat import FlatPart
from accel_core.modules.unwrap import canonical_name
from accel_parallel.checkpoint.optimizers import NamedOptimizer, named_optimizer, state_by_names

__all__ = ["held_state", "named_optimizer_of", "optimizer_state", "reshard", "spread_weights"]

_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state", "load_state_dict")


Lengths = list[int] | None
"""Of the runs that a rank holds; `None` where its parameters are not runs."""


def held_state(
    wrapper: torch.nn.Module,
    shapes: Mapping[str, torch.Size],
    whole: Container[int],
    exchange: Callable[[Lengths], list[Lengths]],
    holders: Sequence[int],
    rank: int,
) -> dict[str, Any] | None:
    """Return a wrapped model's state under its bare names, of each parameter the run that this rank holds.

    Every rank calls it. Loading into what it returns changes the model.
    """
    state = dict(_state(wrapper))
    runs = {name: state[name] for name in shapes if name in state and id(state[name]) not in whole}
    known = {id(parameter) for parameter in runs.values()}
    usable = _is_plain(wrapper) and _is_sharded(wrapper) and shapes.keys() <= state.keys()
    usable = usable and all(run.dim() == 1 and run.is_contiguous() for run in runs.values())
    usable = usable and all(
        id(value) in known or id(value) in whole for value in state.values() if isinstance(value, torch.nn.Parameter)
    )
    answers = exchange([run.numel() for run in runs.values()] if usable else None)
    lengths = [each for each in (answers[holder] for holder in holders) if each is not None]
    if None in answers or any(
        sum(parts) != math.prod(shapes[name]) for name, *parts in zip(runs, *lengths, strict=True)
    ):
        return None
    place = holders.index(rank)
    parts = {
        id(run): FlatPart(run, shapes[name], each, place)
        for (name, run), *each in zip(runs.items(), *lengths, strict=True)
    }
    return {name: parts.get(id(value), value) for name, value in state.items()}


def spread_weights(
    state: Mapping[str, Any], holders: Sequence[int], group: dist.ProcessGroup
) -> Iterator[tuple[str, Any]]:
    """Yield the names and weights that `save_model` writes; what ranks hold runs of as a `SpreadWeight`."""
    spread: dict[int, SpreadWeight] = {}
    for name, value in state.items():
        if isinstance(value, FlatPart):
            gather, first = partial(_gather, value, holders, group), partial(_gather_on_first, value, holders)
            # On devices not from rank to rank: NCCL would make a communicator for each pair, all on the first one's.
            first = first if value.device.type == "cpu" else gather
            lazy = SpreadWeight(tuple(value.shape), value.dtype, gather, gather_on_first=first)
            value = spread.setdefault(id(value), lazy)  # tied names share one
        yield name, value


def _gather(part: FlatPart, holders: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return a tensor whole; every rank calls it."""
    whole = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    for place, (piece, holder) in enumerate(zip(torch.split(whole.view(-1), list(part.lengths)), holders, strict=True)):
        if place == part.place:
            piece.copy_(part.run)
        if piece.numel():  # all know which runs are empty, and none is sent
            dist.broadcast(piece, holder, group=group)
    return whole


def _gather_on_first(part: FlatPart, holders: Sequence[int]) -> torch.Tensor:
    """Return a tensor whole on rank 0, and on the others their part; every rank calls it."""
    # Each run is sent from where it lies, so only rank 0 needs memory for the whole.
    if holders[part.place] != 0:
        if 0 in holders and part.run.numel():
            dist.send(part.run, 0)
        return part.run
    whole = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    for piece, holder in zip(torch.split(whole.view(-1), list(part.lengths)), holders, strict=True):
        if holder == 0:
            piece.copy_(part.run)
        elif piece.numel():
            dist.recv(piece, holder)
    return whole


def optimizer_state(own: torch.optim.Optimizer, model: torch.nn.Module, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, of each entry the run that this rank holds."""
    named = state_by_names(own, [model])
    of_parameters = {
        name: {key: _part(f"{key} of {name}", value, parts.get(name)) for key, value in entries.items()}
        for name, entries in named["state"].items()
    }
    return {**named, "state": of_parameters}


def named_optimizer_of(own: torch.optim.Optimizer, model: torch.nn.Module, parts: Mapping[str, Any]) -> NamedOptimizer:
    """Return an optimizer by parameter names, where this rank holds a contiguous run of each parameter."""
    seen = named_optimizer(own, [model])
    like = {name: parts.get(name, value) for name, value in seen.like.items()}
    groups = [
        {**group, "params": [like[name] for name in names]}
        for group, names in zip(seen.param_groups, seen.names, strict=True)
    ]
    state = {
        like[name]: {key: _part(f"{key} of {name}", v, like[name]) for key, v in seen.state[parameter].items()}
        for name, parameter in seen.like.items()
        if parameter in seen.state
    }
    return replace(seen, param_groups=groups, like=like, state=state, load_state_dict=partial(_load, own, like))


def _load(own: torch.optim.Optimizer, like: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Load a state of runs; an optimizer has none of a parameter of which this rank holds nothing."""
    order = (name for name in like)
    keys = {key: next(order) for group in state["param_groups"] for key in group["params"]}
    empty = {name for name, part in like.items() if isinstance(part, FlatPart) and not part.run.numel()}
    of_parameters = {
        key: {name: _own(value) for name, value in entries.items()}
        for key, entries in state["state"].items()
        if keys.get(key) not in empty
    }
    own.load_state_dict({**state, "state": of_parameters})


def _own(value: object) -> object:
    """Return the run of a part; of a step count, which several parameters may share, a copy."""
    if isinstance(value, FlatPart):
        return value.run
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value


def _part(name: str, value: Any, like: object) -> Any:
    """Return an entry of an optimizer's state as a part of what the parameter is a part of.

    Raises:
        CheckpointError: It has other elements than the parameter, of which nobody knows what the other ranks hold.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(like, FlatPart) or not value.dim():
        return value
    if type(value) is not torch.Tensor or value.shape != like.run.shape:
        raise CheckpointError(
            f"Optimizer state can be sharded only if it has one element per parameter element; got {name}, a "
            f"{type(value).__name__} of shape {tuple(value.shape)} for {like.run.numel()} elements. Use another "
            "optimizer, or fsdp_version=2."
        )
    return like.with_run(value)


def _state(wrapper: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a model's state dict holds, tied parameters by all of their names."""
    for prefix, module in wrapper.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield canonical_name(f"{prefix}.{name}".lstrip(".")), parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield canonical_name(f"{prefix}.{name}".lstrip(".")), buffer


def _is_sharded(wrapper: torch.nn.Module) -> bool:
    """Return whether ranks hold nothing but their pieces; an evaluation leaves what no block has whole beside them."""
    return all(handle.needs_unshard() for handle in _used_handles(wrapper))


def reshard(wrapper: torch.nn.Module) -> None:
    """Free what an evaluation left whole, so that parameters are this rank's pieces; nothing is sent."""
    for handle in _used_handles(wrapper):
        if not handle.needs_unshard():
            handle.reshard(True)


def _used_handles(wrapper: torch.nn.Module) -> list[Any]:
    """Return torch's records of flattened parameters that may lie there whole."""
    handles: list[Any] = [module._handle for module in FullyShardedDataParallel.fsdp_modules(wrapper)]
    # The first forward pass makes the memory for whole weights; before it, none can lie there.
    return [each for each in handles if each is not None and hasattr(each.flat_param, "_full_param_padded")]


def _is_plain(wrapper: torch.nn.Module) -> bool:
    """Return whether the state of a model is what its parts have, and nobody else has a say in it."""
    for module in wrapper.modules():
        if isinstance(module, FullyShardedDataParallel):
            continue
        if any(getattr(module, hooks) for hooks in _HOOKS):  # what they would change is not known here
            return False
        if any(getattr(type(module), method) is not getattr(torch.nn.Module, method) for method in _METHODS):
            return False
        own_loading = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
        if own_loading and not type(module).__module__.startswith("torch.nn.modules."):
            return False
    return True
