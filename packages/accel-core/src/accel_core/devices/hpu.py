"""Intel Gaudi, through habana_frameworks. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["HpuDevice"]


class HpuDevice(Device):
    """Intel Gaudi, through habana_frameworks. Never run on hardware."""

    name = "hpu"
    backend = "hccl"
    label = DistributedType.MULTI_HPU
    visible_variable = "HABANA_VISIBLE_MODULES"

    def is_available(self) -> bool:
        """Say whether torch's extension for this device is loaded and sees one."""
        module = getattr(torch, "hpu", None)
        return module is not None and bool(module.is_available())
