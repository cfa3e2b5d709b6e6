"""What checkpoints need to know of a run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accel_core._records import record
from accel_core.modules.unwrap import canonical_state_dict
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import World, ensure

__all__ = ["BareRun", "Run"]


class Run(Protocol):
    """Everything of a run that is saved and restored: what `Runtime` has, and `BareRun`.

    Attributes:
        models: Prepared models.
        optimizers: Prepared optimizers.
        schedulers: Prepared schedulers.
        dataloaders: Prepared loaders.
        custom_objects: Objects registered for checkpointing.
        scaler: Gradient scaler, if precision needs one.
        step: Accumulation counter.
        project: Where and under which names checkpoints go.
        trackers: Trackers of the run.
        save_state_pre_hooks: Called with models, weights and folder before weights are written.
        load_state_pre_hooks: Called with models and folder before weights are loaded.
        world: This process among its fellows.
    """

    models: list[nn.Module]
    optimizers: list[Any]
    schedulers: list[Any]
    dataloaders: list[Any]
    custom_objects: list[Any]
    step: int
    project: ProjectConfiguration
    save_state_pre_hooks: OrderedDict[int, Callable[..., None]]
    load_state_pre_hooks: OrderedDict[int, Callable[..., None]]

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler, if precision needs one."""

    @property
    def trackers(self) -> list[Any]:
        """Trackers of the run."""

    @property
    def world(self) -> World:
        """This process among its fellows."""

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the full state of a model under canonical names; every rank calls it."""


@record
class BareRun:
    """A run that is nothing but its parts: for a loop without the facade.

    Attributes:
        models: The models, and so on for the other lists.
        world: This process among its fellows; found out where it is not given.
    """

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom_objects: list[Any] = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None
    step: int = 0
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    trackers: list[Any] = field(default_factory=list)
    save_state_pre_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_state_pre_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    world: World = field(default_factory=ensure)

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a model's state under canonical names."""
        return canonical_state_dict(model)
