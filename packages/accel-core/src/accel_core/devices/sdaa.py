"""Tecorigin accelerators, through torch_sdaa. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["SdaaDevice"]


class SdaaDevice(Device):
    """Tecorigin accelerators, through torch_sdaa. Never run on hardware."""

    name = "sdaa"
    backend = "tccl"
    label = DistributedType.MULTI_SDAA
    visible_variable = "SDAA_VISIBLE_DEVICES"

    def is_available(self) -> bool:
        """Say whether torch's extension for this device is loaded and sees one."""
        module = getattr(torch, "sdaa", None)
        return module is not None and bool(module.is_available())
