"""A run without the facade."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
from torch import nn

from accel_core._records import record
from accel_core.checkpoint.format import CheckpointFormat, ModelHolder
from accel_core.checkpoint.plain import PLAIN
from accel_core.modules.unwrap import canonical_state_dict
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import World, ensure


class WholeModels:
    """Models of which every rank holds all."""

    format: CheckpointFormat = PLAIN

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's state, under the bare model's names or under its own."""
        return canonical_state_dict(model) if unwrap else dict(model.state_dict())


@record
class BareRun:
    """A run that is nothing but its parts: for a loop without the facade."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom_objects: list[Any] = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None
    step: int = 0
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    save_state_pre_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_state_pre_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    data: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    world: World = field(default_factory=ensure)  # this process among its fellows; found out where it is not given
    strategy: ModelHolder = field(default_factory=WholeModels)
