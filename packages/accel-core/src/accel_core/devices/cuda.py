"""NVIDIA and AMD GPUs."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["CudaDevice"]


class CudaDevice(Device):
    """NVIDIA and AMD GPUs, as torch sees them under the name cuda."""

    name = "cuda"
    backend = "nccl"
    label = DistributedType.MULTI_GPU
    visible_variable = "CUDA_VISIBLE_DEVICES"

    def is_available(self) -> bool:
        """Say whether torch was built for CUDA or ROCm and sees a GPU."""
        return torch.cuda.is_available()
