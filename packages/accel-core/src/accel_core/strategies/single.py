"""One process: the model trains where it stands."""

from __future__ import annotations

import torch

from accel_core.options.enums import DistributedType
from accel_core.strategies.strategy import Strategy


class SingleStrategy(Strategy):
    """One process trains one copy of the model."""

    name = "single"
    initializes = True

    def label(self) -> DistributedType:
        """Return the label of the device: nothing is distributed."""
        return self.world.base_label

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model unchanged."""
        return model
