"""FSDP version 2 as a strategy: `fully_shard` does the work."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.host.versions import is_torch_version, require_torch
from accel_core.modules.linear_loss import asked_head
from accel_core.optim.optimizer import Stepper
from accel_core.strategies.parts import Parts
from accel_parallel.fsdp2.in_place import is_sharded, reshard, shard
from accel_parallel.fsdp2.sliced_loss import slice_heads
from accel_parallel.fsdp2.usage import Usage
from accel_parallel.sharded import ShardedStrategy
from accel_parallel.sharding.methods import GatheringMethods
from accel_parallel.sharding.param_attrs import keeping_marks
from accel_parallel.sharding.refusals import cut_what_is_loaded, refuse_gloo
from accel_parallel.sharding.wrapping import WrapPlan


class FullyShardStrategy(ShardedStrategy):
    """Parameters become `DTensor`s in place; blocks gather them for as long as they compute."""

    name = "fsdp2"
    initializes = True
    combines = ("cp", "ep", "tp")
    shards_integers = is_torch_version(">=", "2.13")  # before, it made them parameters that require gradients, and cast

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        if not self.plugin.offloads:  # whose parts are the CPU's
            refuse_gloo(parts.world)
        if self.experts is not None:
            self.experts.cast = self.plugin.param_dtype
        self.usage = Usage(self.world)
        self._methods: MutableMapping[torch.nn.Module, GatheringMethods] = WeakIdKeyDictionary()

    def plan(self, model: torch.nn.Module) -> WrapPlan:
        """Also refuse what the installed torch cannot shard in place.

        Raises:
            TorchVersionError: Ranks split the model by tensor parallel, and torch is too old for it.
        """
        plan = super().plan(model)
        if self.tensor is not None:
            require_torch("fsdp2_with_tp")  # before, uneven parts came back in the wrong order
        bare = self._bare(model)
        head = asked_head(bare)
        return plan if head is None or not self._slices else plan.with_head(bare, head)

    @property
    def _slices(self) -> bool:
        """Whether losses are computed from slices of a head: its shards lie on the device, and are cut once."""
        return self.tensor is None and not self.plugin.offloads

    def _left_out(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters of experts, which other ranks hold in parts."""
        return () if self.experts is None else self.experts.check(model)

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the planned blocks in place, inner ones first, and then the rest."""
        plan = self.plans[model]
        from_main = None if self.tensor is None else False
        if self.experts is not None:
            from_main = self.experts.split(model) and self.tensor is None
        with keeping_marks(model):
            shard(model, plan, self.plugin, self.mesh, self.world, from_main=from_main)
        self._names.remember(model)
        self.averaging.watch(model, plan.whole(model))
        self._watch(model)
        cut_what_is_loaded(model)
        return self._guarded(model)

    def _check_spread(self, model: torch.nn.Module) -> None:
        """Also refuse a model that cannot be split over the ranks of tensor parallel."""
        if self.tensor is None:
            super()._check_spread(model)
        else:
            self.tensor.check(model)

    def split(self, model: torch.nn.Module) -> torch.nn.Module:
        """Also split a model over the ranks of tensor parallel, before what each of them holds is sharded."""
        if self.tensor is not None:
            bare = self._bare(model)
            self.tensor.split(bare, self.tensor.check(bare), from_main=bool(self.plugin.cpu_ram_efficient_loading))
            self.tensor.watch(bare)
        if self.experts is not None:
            self.experts.split(self._bare(model), from_main=bool(self.plugin.cpu_ram_efficient_loading))
        return super().split(model)

    def stepper(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Also let ranks use different parameters of a block, and refuse a step where they ran different blocks."""
        optimizer.register_step_pre_hook(lambda own, *_: self.usage.compare(own))
        return super().stepper(optimizer)

    def held(self, model: torch.nn.Module, *, buffers: bool = False) -> list[torch.Tensor]:
        """Return the shards that this rank holds; see `Strategy.held`."""
        reshard(self._bare(model))
        return super().held(model, buffers=buffers)

    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Return whether a model was sharded in place before."""
        return is_sharded(model)

    def adopt(self, model: torch.nn.Module) -> None:
        """Take over a model that was sharded before; what is whole in it starts alike and is averaged here."""
        super().adopt(model)
        self._watch(self._bare(model))

    def _watch(self, model: torch.nn.Module) -> None:
        """Follow what a model that was sharded in place computes, and when."""
        if model not in self._methods and is_sharded(model):
            self._methods[model] = GatheringMethods(model)
        if model in self._methods:
            self._methods[model].watch(model)
        if self._slices:
            slice_heads(model, self.plugin.mixed_precision_policy)
        self.usage.watch(model)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes add up whole gradients on each rank."""
        return self._synchronized(model, False)

    def sync_next_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes reduce and shard what was added up."""
        return self._synchronized(model, True)

    @contextmanager
    def _synchronized(self, model: torch.nn.Module, wanted: bool) -> Iterator[None]:
        bare = self._bare(model)
        sharded = [each for each in bare.modules() if isinstance(each, FSDPModule)]
        before = not self.averaging.is_held(bare)
        with self.averaging.holding(bare, not wanted):
            for each in sharded:
                each.set_requires_gradient_sync(wanted, recurse=False)
            try:
                yield
            finally:
                for each in sharded:
                    each.set_requires_gradient_sync(before, recurse=False)
