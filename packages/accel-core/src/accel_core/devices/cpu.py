"""The CPU: always there, the last choice."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device


class CpuDevice(Device):
    """The processor itself; processes talk through gloo."""

    def is_available(self) -> bool:
        """Return True: every machine has one."""
        return True

    def count(self) -> int:
        """Return 1: all ranks of a machine share its processor."""
        return 1

    def place(self, local_rank: int) -> torch.device:
        """Return the processor; `local_rank` does not matter."""
        return torch.device("cpu")

    def supports_bf16(self) -> bool:
        """Return True: torch emulates bfloat16 on every processor."""
        return True

    def synchronize(self) -> None:
        """Return at once: work on the CPU is done when its call returns."""

    def empty_cache(self) -> None:
        """Return at once: torch keeps no cache of CPU memory."""

    def rng_state(self) -> torch.Tensor | None:
        """Return nothing: torch's own generator is the CPU's, and is kept apart."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Return at once: see `rng_state`."""
