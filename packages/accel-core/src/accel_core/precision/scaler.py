"""Gradient scalers, by the label of a run."""

from __future__ import annotations

from typing import Any

import torch

from accel_core.options.enums import DistributedType
from accel_core.process import world

__all__ = ["get_grad_scaler"]

_DEVICES = {
    DistributedType.MULTI_CPU: "cpu",
    DistributedType.MULTI_GPU: "cuda",
    DistributedType.MULTI_HPU: "hpu",
    DistributedType.MULTI_MLU: "mlu",
    DistributedType.MULTI_MUSA: "musa",
    DistributedType.MULTI_NEURON: "neuron",
    DistributedType.MULTI_NPU: "npu",
    DistributedType.MULTI_SDAA: "sdaa",
    DistributedType.MULTI_XPU: "xpu",
}


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Make the gradient scaler of fp16 training.

    Args:
        distributed_type: Label of the run, which names its hardware; this process's device where it names none.
        **kwargs: Passed to `torch.amp.GradScaler`.
    """
    device = None if distributed_type is None else _DEVICES.get(distributed_type)
    return torch.amp.GradScaler(device or world.ensure().device.type, **kwargs)
