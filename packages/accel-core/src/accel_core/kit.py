"""The verbs of an Accelerator as a strategy gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.runtime import Runtime

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["AcceleratorKit"]


class AcceleratorKit:
    """What `strategies.parts.Kit` describes, each verb through the method that a subclass may override."""

    def __init__(
        self, runtime: Runtime, prepare_one: Callable[..., Any], prepare_data_loader: Callable[..., Any]
    ) -> None:
        self._runtime = runtime
        self._prepare_one = prepare_one
        self._prepare_data_loader = prepare_data_loader
        self.keep_model = runtime.keep_model

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """The optimizers prepared so far."""
        return self._runtime.optimizers

    def prepare_model(self, model: torch.nn.Module, placement: bool | None = None) -> torch.nn.Module:
        """Prepare and register a model."""
        model = self._prepare_one(model, first_pass=True, device_placement=placement)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap and register an optimizer."""
        made: AcceleratedOptimizer = self._prepare_one(optimizer, first_pass=True, device_placement=placement)
        return made

    def prepare_loader(
        self, loader: DataLoader[Any], placement: bool | None = None, slice_fn: Callable[..., Any] | None = None
    ) -> DataLoader[Any]:
        """Give each rank its part of a loader, and register it; `_prepare_one` takes no `slice_fn`."""
        if slice_fn is None:
            loader = self._prepare_one(loader, first_pass=True, device_placement=placement)
        else:
            loader = self._prepare_data_loader(loader, placement, slice_fn)
        return loader

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Wrap and register a schedule."""
        made: AcceleratedScheduler = self._prepare_one(scheduler)
        return made

    def prepare_other(self, given: object) -> object:
        """Let a subclass prepare what is of no known kind, in both passes."""
        return self._prepare_one(self._prepare_one(given, first_pass=True))
