"""A flag that any rank can raise and all ranks read together."""

from __future__ import annotations

import torch

from accel_core.comm.collectives import reduce
from accel_core.process import world


class Trigger:
    """A flag that any rank can raise and all ranks read together.

    Attributes:
        flag: `None` until it is used; then this rank's part of the flag, a tensor of one integer.
    """

    def __init__(self) -> None:
        self.flag: torch.Tensor | None = None

    def set(self) -> None:
        """Raise the flag on this rank."""
        self.flag = torch.tensor(1, device=world.ensure().device)

    def check(self) -> bool:
        """Return whether any rank raised the flag, and lower it on all; every rank has to call it."""
        device = world.ensure().device
        if self.flag is None:
            self.flag = torch.tensor(0, device=device)
        raised = bool(reduce(self.flag, reduction="sum").item())
        if raised:
            self.flag = torch.tensor(0, device=device)
        return raised
