"""States of models that FSDP1 wraps, by torch's own state dicts: in shards as `DTensor`s of parameters, or whole.

A model that is not sharded (NO_SHARD, or one process) has plain tensors, whole on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.errors import CheckpointError
from accel_core.modules.unwrap import canonical_name, canonical_state_dict, extract_model_from_parallel
from accel_parallel.checkpoint.optimizers import state_by_names


class Wrappers:
    """The FSDP modules around models, and the names that were one tensor before a model was flattened."""

    def __init__(self) -> None:
        # A wrapper holds its model, so a strong reference to it would keep both alive forever.
        self._known: MutableMapping[torch.nn.Module, tuple[ReferenceType[torch.nn.Module], list[list[str]]]]
        self._known = WeakIdKeyDictionary()

    def add(self, bare: torch.nn.Module, wrapper: torch.nn.Module, ties: list[list[str]]) -> None:
        """Remember what a bare model is wrapped in."""
        self._known[bare] = ref(wrapper), ties

    def of(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return the FSDP module around a model, if there is one."""
        kept = self._known.get(extract_model_from_parallel(model, keep_torch_compile=False))
        return None if kept is None else kept[0]()

    def ties_of(self, model: torch.nn.Module) -> list[list[str]]:
        """Return the groups of names that were one tensor before a model was flattened."""
        kept = self._known.get(extract_model_from_parallel(model, keep_torch_compile=False))
        return [] if kept is None else kept[1]

    def under(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the FSDP module that an optimizer trains, `None` for no wrapped model; refuse several."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        wrappers = [kept() for kept, _ in self._known.values()]
        found = [w for w in wrappers if w is not None and any(id(p) in held for p in w.parameters())]
        if len(found) > 1:
            raise CheckpointError(
                f"FSDP1 gathers the state of an optimizer through its model; got one that trains {len(found)} models. "
                "Use one optimizer for each model, or fsdp_version=2."
            )
        return found[0] if found else None


def own_state(model: torch.nn.Module, wrapper: torch.nn.Module | None) -> dict[str, Any]:
    """Return a model's state under its bare names, with this rank's part of each tensor; every rank calls it."""
    return canonical_state_dict(model) if wrapper is None else state_of(wrapper)


def own_optimizer_state(
    optimizer: torch.optim.Optimizer, models: Sequence[Any], wrapper: torch.nn.Module | None
) -> dict[str, Any]:
    """Return an optimizer's state by parameter names, with this rank's part of each tensor; every rank calls it."""
    return state_by_names(optimizer, models) if wrapper is None else optimizer_of(wrapper, optimizer)


def state_of(wrapper: torch.nn.Module, *, whole: bool = False, on_first: bool = False) -> dict[str, Any]:
    """Return a wrapped model's state under its bare names; every rank calls it.

    In shards, or whole on every rank, or on the first alone.
    """
    with _in_form(wrapper, whole, on_first):
        return {canonical_name(name): value for name, value in wrapper.state_dict().items()}


def load_state(wrapper: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load what `state_of` returned in shards; every rank calls it."""
    with _in_form(wrapper):
        wrapper.load_state_dict(state)


def optimizer_of(wrapper: torch.nn.Module, own: torch.optim.Optimizer, *, whole: bool = False) -> dict[str, Any]:
    """Return an optimizer's state by parameter names, in shards or whole on every rank; every rank calls it."""
    with _in_form(wrapper, whole):
        return FullyShardedDataParallel.optim_state_dict(wrapper, own)


def load_optimizer(wrapper: torch.nn.Module, own: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `optimizer_of` returned in shards; every rank calls it."""
    with _in_form(wrapper):
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(wrapper, own, state)
        own.load_state_dict(loaded)


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that this rank holds, under their own names; flattened ones stay flat."""
    return {
        canonical_name(name): tensor.detach()
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
    }


def reshard(wrapper: torch.nn.Module) -> None:
    """Free what an evaluation left whole, so that parameters are this rank's pieces; nothing is sent."""
    for module in FullyShardedDataParallel.fsdp_modules(wrapper):
        handle: Any = module._handle
        # The first forward pass makes the memory for whole weights; before it, none can lie there.
        if handle and hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
            handle.reshard(True)


@contextmanager
def _in_form(wrapper: Any, whole: bool = False, on_first: bool = False) -> Iterator[None]:
    """Let states of a wrapper, and of optimizers of its parameters, be in shards or whole in the block."""
    # On the CPU, torch crashes when it moves a full state dict to the CPU.
    offload = {"offload_to_cpu": wrapper.compute_device.type != "cpu"}
    if whole or wrapper.sharding_strategy is ShardingStrategy.NO_SHARD:
        kind, given = StateDictType.FULL_STATE_DICT, offload | {"rank0_only": on_first}
        configs: Any = FullStateDictConfig(**given), FullOptimStateDictConfig(**given)
    else:
        kind = StateDictType.SHARDED_STATE_DICT
        configs = ShardedStateDictConfig(**offload), ShardedOptimStateDictConfig(**offload)
    with warnings.catch_warnings():
        # torch prefers functions that look for the wrapper anew, and change nothing in what is returned.
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(wrapper, kind, *configs):
            yield
