"""Intel GPUs. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["XpuDevice"]


class XpuDevice(Device):
    """Intel GPUs. Never run on hardware."""

    name = "xpu"
    backend = "xccl"
    label = DistributedType.MULTI_XPU
    visible_variable = None

    def is_available(self) -> bool:
        """Say whether torch's extension for this device is loaded and sees one."""
        module = getattr(torch, "xpu", None)
        return module is not None and bool(module.is_available())
