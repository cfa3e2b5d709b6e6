"""TPUs and other XLA devices, through torch_xla. Never run on hardware."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch

from accel_core.devices.device import Device
from accel_core.host import environ

__all__ = ["XlaDevice"]


def _xla_model() -> ModuleType:
    import torch_xla.core.xla_model as xm

    return xm  # type: ignore[no-any-return]


class XlaDevice(Device):
    """TPUs and other XLA devices. Never run on hardware."""

    supports_fp16 = False

    @property
    def module(self) -> ModuleType:
        """The device module of torch_xla."""
        return _xla_model()

    def is_available(self) -> bool:
        """Return whether torch_xla is installed and not switched off by USE_TORCH_XLA."""
        return environ.flag("USE_TORCH_XLA", True) and importlib.util.find_spec("torch_xla") is not None

    def count(self) -> int:
        """Return how many XLA devices this host has."""
        return len(_xla_model().get_xla_supported_devices() or [])

    def place(self, local_rank: int) -> torch.device:
        """Return the device that the XLA runtime gave this process."""
        device: torch.device = _xla_model().xla_device()
        return device

    def supports_bf16(self) -> bool:
        """Return True: TPUs compute in bfloat16."""
        return True

    def configure_bf16(self) -> None:
        """Tell the XLA runtime to compute in bfloat16; with ACCELERATE_DOWNCAST_BF16 doubles stay floats."""
        downcast = environ.flag("ACCELERATE_DOWNCAST_BF16")
        environ.write("XLA_USE_BF16", int(not downcast))
        environ.write("XLA_DOWNCAST_BF16", int(downcast))

    def synchronize(self) -> None:
        """Wait for the device to finish its queue."""
        _xla_model().wait_device_ops()

    def empty_cache(self) -> None:
        """Return at once: the XLA runtime owns its memory."""
