"""Apple GPUs. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device


class MpsDevice(Device):
    """Apple GPUs; one process only. Never run on hardware."""

    def is_available(self) -> bool:
        """Return whether torch was built with MPS and the machine has it."""
        return torch.backends.mps.is_available()

    def place(self, local_rank: int) -> torch.device:
        """Return the one Apple GPU; `local_rank` does not matter."""
        return torch.device("mps")

    def supports_bf16(self) -> bool:
        """Say that bfloat16 arithmetic is left to torch here."""
        return True
