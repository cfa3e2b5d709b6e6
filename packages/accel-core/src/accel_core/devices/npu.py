"""Ascend NPUs, through torch_npu. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["NpuDevice"]


class NpuDevice(Device):
    """Ascend NPUs, through torch_npu. Never run on hardware."""

    name = "npu"
    backend = "hccl"
    label = DistributedType.MULTI_NPU
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"

    def is_available(self) -> bool:
        """Say whether torch's extension for this device is loaded and sees one."""
        module = getattr(torch, "npu", None)
        return module is not None and bool(module.is_available())
