"""States of models that FSDP1 wraps, as ranks hold them: torch turns flattened pieces into `DTensor`s of parameters.

A model that is not sharded (NO_SHARD, or one process) has plain tensors, whole on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

from accel_core.modules.unwrap import canonical_name
from accel_core.optim.optimizer import AcceleratedOptimizer

__all__ = ["in_shards", "inside", "load_optimizer", "load_state", "local_tensors", "optimizer_of", "state_of"]


def in_shards(wrapper: torch.nn.Module | None) -> bool:
    """Return whether ranks hold shards of a wrapped model; with one process or NO_SHARD, each holds all of it."""
    return isinstance(wrapper, FullyShardedDataParallel) and wrapper.sharding_strategy is not ShardingStrategy.NO_SHARD


def inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside accel's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    found: torch.optim.Optimizer = optimizer
    return found


def state_of(wrapper: torch.nn.Module) -> dict[str, Any]:
    """Return a wrapped model's state under its bare names; every rank calls it."""
    with _as_held(wrapper):
        return {canonical_name(name): value for name, value in wrapper.state_dict().items()}


def load_state(wrapper: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load what `state_of` returned; every rank calls it."""
    with _as_held(wrapper):
        wrapper.load_state_dict(state)


def optimizer_of(wrapper: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by parameter names; every rank calls it."""
    with _as_held(wrapper):
        return FullyShardedDataParallel.optim_state_dict(wrapper, optimizer)


def load_optimizer(wrapper: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `optimizer_of` returned; every rank calls it."""
    with _as_held(wrapper):
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(wrapper, optimizer, state))


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that this rank holds, under their own names; flattened ones stay flat."""
    return {
        canonical_name(name): tensor.detach()
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
    }


@contextmanager
def _as_held(wrapper: torch.nn.Module) -> Iterator[None]:
    """Let states of a wrapper, and of optimizers of its parameters, be as ranks hold them in the block."""
    if in_shards(wrapper):
        kind = StateDictType.SHARDED_STATE_DICT
        configs: Any = ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False)
    else:
        kind = StateDictType.FULL_STATE_DICT
        # On the CPU, torch crashes when it moves a full state dict to the CPU.
        whole = {"offload_to_cpu": False, "rank0_only": False}
        configs = FullStateDictConfig(**whole), FullOptimStateDictConfig(**whole)
    with warnings.catch_warnings():
        # torch prefers functions that look for the wrapper anew, and change nothing in what is returned.
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(wrapper, kind, *configs):
            yield
