"""Moore Threads GPUs, through torch_musa. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["MusaDevice"]


class MusaDevice(Device):
    """Moore Threads GPUs, through torch_musa. Never run on hardware."""

    name = "musa"
    backend = "mccl"
    label = DistributedType.MULTI_MUSA
    visible_variable = "MUSA_VISIBLE_DEVICES"

    def is_available(self) -> bool:
        """Say whether torch's extension for this device is loaded and sees one."""
        module = getattr(torch, "musa", None)
        return module is not None and bool(module.is_available())
