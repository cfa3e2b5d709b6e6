"""Gradient scalers: made by the label of a run, and undone before gradients are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel_core.options.enums import DistributedType
from accel_core.options.hardware import HARDWARE
from accel_core.process import world

__all__ = ["get_grad_scaler", "unscale"]

_DEVICES: dict[DistributedType, str] = {row.label: row.name for row in HARDWARE if row.label is not DistributedType.NO}


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Create the gradient scaler of fp16 training."""
    device = None if distributed_type is None else _DEVICES.get(distributed_type)
    return torch.amp.GradScaler(device or world.ensure().device.type, **kwargs)


def unscale(scaler: torch.amp.GradScaler, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Divide the gradients of optimizers by the scale, unless that was done since their last step."""
    for optimizer in optimizers:
        # torch raises at a second call for the same step, and tells only here whether there was a first.
        unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"].value != 0
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if not unscaled and has_gradients:
            scaler.unscale_(optimizer)
