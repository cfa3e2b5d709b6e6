"""Cambricon MLUs, through torch_mlu. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["MluDevice"]


class MluDevice(Device):
    """Cambricon MLUs, through torch_mlu. Never run on hardware."""

    name = "mlu"
    backend = "cncl"
    label = DistributedType.MULTI_MLU
    visible_variable = "MLU_VISIBLE_DEVICES"

    def is_available(self) -> bool:
        """Say whether torch's extension for this device is loaded and sees one."""
        module = getattr(torch, "mlu", None)
        return module is not None and bool(module.is_available())
