"""A mesh on which parameters are not sharded: every replica is trained by the ranks along the other axes together."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.errors import ConfigurationError, EngineUnavailableError, PreparationError
from accel_core.mesh.layout import DATA_AXES, Layout
from accel_core.modules import empty
from accel_core.options.enums import DistributedType
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel_core.strategies import placement, recipe
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Clip, Parts
from accel_parallel.averaging import Averaging, reading_groups
from accel_parallel.sharding import gradients
from accel_parallel.sharding.format import FullyShardedFormat
from accel_parallel.sharding.gather import gather
from accel_parallel.sharding.loading import receive, refuse_empty, starts_from_main
from accel_parallel.sharding.refusals import cut_what_is_loaded, refuse_resizing
from accel_parallel.sharing import SharingStrategy
from accel_parallel.tensor.plan import TensorPlan
from accel_parallel.tensor.split import is_split, move_unsplit

_COPIES = tuple(axis for axis in DATA_AXES if axis != "ep")
"""Axes along which ranks hold equal parts of a model, or shards of them."""


class MeshStrategy(SharingStrategy):
    """Gradients are averaged over the axes along which ranks see other samples, or other parts of a sequence."""

    name = "mesh"
    initializes = True
    plugin_type: ClassVar[type | None] = TorchTensorParallelPlugin
    evaluates_whole = False
    combines: ClassVar[tuple[str, ...]] = ("cp", "ep", "tp")
    """Axes along which ranks hold different parts of a replica, or of its batch."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.averaging = Averaging(self.world.device, reading_groups(parts))
        if self._spreads:
            self.format = FullyShardedFormat(
                "SHARDED_STATE_DICT", lambda own, keep: gather(own.state_dict(), keep=keep)
            )
        self._prepared: MutableMapping[torch.nn.Module, bool] = WeakIdKeyDictionary()

    @classmethod
    def lay_out(cls, rank: int, world_size: int, parallelism: ParallelismConfig | None, plugin: Any) -> Layout:
        """Lay the ranks out as the axes say; refuse an axis that this version does not have."""
        axes = [] if parallelism is None else parallelism.active_mesh_dims
        others = [axis for axis in axes if axis not in (*_COPIES, *cls.combines)]
        if others:
            raise EngineUnavailableError(
                f"Ranks do not share a replica along every axis of a mesh yet; got the axes {others}. Set their sizes "
                "to 1; accel does not change them by itself."
            )
        return super().lay_out(rank, world_size, parallelism, plugin)

    def check(self, bundle: Bundle) -> None:
        """Also refuse a model that is to be sharded: one that arrives sharded had another strategy take it."""
        if bundle.models and self.layout.size("dp_shard") > 1:
            raise ConfigurationError(
                "FSDP shards parameters along an axis of a mesh; got the axes "
                f"{[axis for axis, size in self.layout.sizes if size > 1]} and no plugin of FSDP. Pass "
                "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), set dp_shard_size=1, or load the model "
                "sharded."
            )
        super().check(bundle)

    @property
    def forms(self) -> tuple[str, ...]:
        """What parameters are once they are split; see `optimizers.Refused`."""
        split = ("split",) if self.tensor is not None else ()
        return ("distributed", "several", *split) if self._spreads else ()

    def label(self) -> DistributedType:
        """Return the label of several processes on this device."""
        return self.world.hardware.label if self.world.size > 1 else self.world.base_label

    def plan(self, model: torch.nn.Module) -> TensorPlan:
        """Return how a model will be split over the ranks of a replica; refuse one that cannot be.

        Raises:
            PreparationError: A device map or FSDP spreads it, or it cannot be split.
        """
        bare = self._bare(model)
        if not self._spreads or self.is_prepared(bare):
            return TensorPlan()
        placement.refuse_sharded(bare)
        devices = placement.devices_of(bare)
        if len(devices) > 1:
            raise PreparationError(
                "A model that a device map spreads cannot be split over ranks as well; got the devices "
                f"{', '.join(sorted(devices))}. Load it without a device map."
            )
        if self.experts is not None:
            self.experts.check(bare)
        return TensorPlan() if self.tensor is None else self.tensor.check(bare)

    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Return whether a model's gradients are averaged already."""
        return self._bare(model) in self._prepared

    def place(self, model: torch.nn.Module) -> None:
        """Move a model to the device, of experts this rank's alone; of one that arrived split, what is whole."""
        if self.experts is not None:
            self.experts.split(self._bare(model))
        if self.tensor is not None and empty.seed_of(model) is not None:
            return  # once it is split
        if is_split(model):
            move_unsplit(model, self.world.device)
        else:
            super().place(model)

    def split(self, model: torch.nn.Module) -> torch.nn.Module:
        """Split a model over the ranks of expert and of tensor parallel."""
        bare = self._bare(model)
        if self.experts is not None:
            self.experts.split(bare)
        if self.tensor is not None:
            self.tensor.split(bare, self.plans[model])
            if empty.seed_of(bare) is not None:
                empty.initialize(bare, self.world.device)
            self.tensor.watch(bare)
        if self._spreads:
            cut_what_is_loaded(bare)
            refuse_resizing(bare)
        return model

    def compile_blocks(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile the repeated blocks in place, if the run compiles by region."""
        recipe.compile_blocks_in_place(model, self.parts.compilation)
        return model

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Start everywhere from the values of the first rank, and average gradients from now on."""
        bare = self._bare(model)
        if self.experts is not None and self.experts.split(bare):
            receive(bare.modules(), self.world.device)
        elif not self._spreads:
            refuse_empty(bare, self.world)
            if starts_from_main(bare, self.world, asked=False):
                receive(bare.modules(), self.world.device)
        self._names.remember(bare)
        self.averaging.watch(bare, self._averaged(bare))
        self._prepared[bare] = True
        return model

    def _averaged(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are averaged over all axes along which ranks read different data."""
        return list(model.parameters())

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes add up gradients on each rank."""
        return self.averaging.holding(self._bare(model), True)

    def sync_next_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes average what was added up."""
        return self.averaging.holding(self._bare(model), False)

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Scale gradients, wherever they lie, down to a common norm; returns a plain scalar, equal on all ranks."""
        self.averaging.reduce_partial()  # norms of sums that are not complete would be wrong
        return gradients.clip_norm(self._names.trained(clip.parameters), clip.limit, clip.norm_type)

    def clip_grad_value_(self, clip: Clip) -> None:
        """Clip each gradient element, wherever it lies."""
        self.averaging.reduce_partial()
        gradients.clip_value(self._names.trained(clip.parameters), clip.limit)
