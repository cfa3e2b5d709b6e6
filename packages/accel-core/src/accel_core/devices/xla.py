"""TPUs and other XLA devices, through torch_xla. Never run on hardware."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch

from accel_core.devices.device import Device
from accel_core.host import environ
from accel_core.options.engines import engines


def library(module: str = "torch_xla") -> ModuleType:
    """Import torch_xla, or a module of it.

    Raises:
        MissingDependencyError: torch_xla is not installed.
    """
    engines()["xla"].require()
    return importlib.import_module(module)


class XlaDevice(Device):
    """TPUs and other XLA devices. Never run on hardware."""

    supports_fp16 = False

    @property
    def module(self) -> ModuleType:
        """The device module of torch_xla."""
        return library("torch_xla.core.xla_model")

    def is_available(self) -> bool:
        """Return whether torch_xla is installed and not switched off by USE_TORCH_XLA."""
        return environ.flag("USE_TORCH_XLA", True) and importlib.util.find_spec("torch_xla") is not None

    def count(self) -> int:
        """Return how many XLA devices this host has."""
        return len(self.module.get_xla_supported_devices() or [])

    def place(self, local_rank: int) -> torch.device:
        """Return the device that the XLA runtime gave this process."""
        device: torch.device = library().device()
        return device

    def group_arguments(self) -> dict[str, Any]:
        """Make torch_xla's process-group backend known, and let the ranks meet where the XLA runtime says."""
        library("torch_xla.distributed.xla_backend")
        return {"init_method": "xla://"}

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
        self.module.wait_device_ops()

    def empty_cache(self) -> None:
        """Return at once: the XLA runtime owns its memory."""

    def rng_state(self) -> torch.Tensor | None:
        """Return the seed of the device's generator, a scalar on the CPU."""
        return torch.tensor(int(self.module.get_rng_state()))

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back a seed that `rng_state` returned."""
        self.module.set_rng_state(int(state))
