"""FSDP version 2 as a strategy: `fully_shard` does the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from accel_core.comm.control import in_step
from accel_core.strategies.sharding.loading import receive
from accel_core.strategies.sharding.strategy import ShardedStrategy, views_of
from accel_core.strategies.sharding.wrapping import WrapPlan

__all__ = ["FullyShardStrategy"]


class FullyShardStrategy(ShardedStrategy):
    """Parameters become `DTensor`s in place; blocks gather them for as long as they compute."""

    name = "fsdp2"

    def _shard(self, model: torch.nn.Module, plan: WrapPlan) -> torch.nn.Module:
        """Shard the blocks of a plan, those inside others first, and then the rest."""
        if self.world.is_main:
            plan.tell(model)
        arguments = self._arguments()
        from_main = self._loads_from_main(model)
        with in_step(self.world, "prepare: fully_shard", views_of(model)):
            for block in (*(block for _, block in plan.blocks), model):
                if from_main:
                    receive(block.modules(), self.world.device)
                fully_shard(block, ignored_params=set(plan.whole(model)), **arguments)
        for parameter in plan.whole(model):
            parameter.data = parameter.data.to(self.world.device)
        self._names.remember(model)
        self._replicate(model, plan)
        return model

    def _arguments(self) -> dict[str, Any]:
        """Return what `fully_shard` is given."""
        policy, offload = self.plugin.mixed_precision_policy, self.plugin.cpu_offload
        if isinstance(offload, CPUOffloadPolicy) and self.world.device.type == "cpu":
            offload = CPUOffloadPolicy(pin_memory=False)  # only memory that an accelerator reads can be pinned
        return {
            "mesh": self.mesh,
            "reshard_after_forward": self.plugin.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy() if policy is None else policy,
            "offload_policy": offload,
        }

    def _is_sharded(self, model: torch.nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes add up whole gradients on each rank."""
        return self._synchronised(model, False)

    def sync_next_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes reduce and shard what was added up."""
        return self._synchronised(model, True)

    @contextmanager
    def _synchronised(self, model: torch.nn.Module, wanted: bool) -> Iterator[None]:
        sharded: Any = self._bare(model)
        if not self._is_sharded(sharded):
            yield
            return
        before = not self._held.get(sharded, False)
        with self._holding(sharded, not wanted):
            sharded.set_requires_gradient_sync(wanted)
            try:
                yield
            finally:
                sharded.set_requires_gradient_sync(before)
