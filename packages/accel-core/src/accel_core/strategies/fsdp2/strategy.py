"""FSDP version 2 as a strategy: `fully_shard` does the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from accel_core.comm.control import in_step
from accel_core.strategies import recipe
from accel_core.strategies.sharding.loading import receive
from accel_core.strategies.sharding.recomputing import recompute
from accel_core.strategies.sharding.strategy import ShardedStrategy, keep_masters, views_of
from accel_core.strategies.sharding.wrapping import WrapPlan

__all__ = ["FullyShardStrategy"]


class FullyShardStrategy(ShardedStrategy):
    """Parameters become `DTensor`s in place; blocks gather them for as long as they compute."""

    name = "fsdp2"

    def prepare_model(
        self, model: torch.nn.Module, *, device_placement: bool | None = None, evaluation: bool = False
    ) -> torch.nn.Module:
        """Shard one model in place, also one that is not trained: it may fit on no single device.

        Args:
            model: The model. Of a compiled one the inside is sharded, and compiled again as it was.
            device_placement: Not used: torch moves each block to the device where it is sharded.
            evaluation: It is not trained.

        Returns:
            The model, or its compiled form.
        """
        given, model = model, recipe.inside(model)
        if self._is_sharded(model):
            self._names.remember(model)
            self._own(given)
            return given
        plan = self.check_model(model)
        self._names.remember(model)
        forward_before = model.__dict__.get("forward")
        model = self.number_format.wrap(self.number_format.convert(model))
        if self.parts.precision.name != "no":
            keep_masters(model)
        if self.plugin.activation_checkpointing:
            recompute((block for _, block in plan.blocks), offload=bool(self.plugin.activation_checkpointing_offload))
        if given is not model:
            self._shard(model, plan)
            model = recipe.keep_compiled(given, model, forward_before)
        else:
            recipe.compile_in_place([block for _, block in plan.blocks] or [model], self.parts.compilation)
            self._shard(model, plan)
            model = recipe.compile_whole(model, self.parts.compilation)
        self._own(model)
        return model

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard a model in place, as the plugin says."""
        self._shard(model, self.check_model(model))
        return model

    def _shard(self, model: torch.nn.Module, plan: WrapPlan) -> None:
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
        sharded: Any = recipe.inside(model)
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
