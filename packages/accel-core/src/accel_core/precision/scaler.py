"""Gradient scalers, by the label of a run."""

from __future__ import annotations

from typing import Any

import torch

from accel_core.options.enums import DistributedType
from accel_core.options.hardware import HARDWARE
from accel_core.process import world

__all__ = ["get_grad_scaler"]

_DEVICES: dict[DistributedType, str] = {row.label: row.name for row in HARDWARE if row.label is not DistributedType.NO}


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Make the gradient scaler of fp16 training.

    Args:
        distributed_type: Label of the run, which names its hardware; this process's device where it names none.
        **kwargs: Passed to `torch.amp.GradScaler`.
    """
    device = None if distributed_type is None else _DEVICES.get(distributed_type)
    return torch.amp.GradScaler(device or world.ensure().device.type, **kwargs)
