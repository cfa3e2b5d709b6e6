"""Models whose weights live elsewhere: how the core saves what another package holds.

The package that offloads weights registers an `OffloadedWeights`; code that reads a model's state dict asks `find`
first, so that it never writes empty tensors.
"""

from typing import Protocol

import torch
from torch import nn


class OffloadedWeights(Protocol):
    """A holder of weights that a model shows as empty."""

    def holds(self, model: nn.Module) -> bool:
        """Return whether some tensors of the model are stored elsewhere.

        Args:
            model: The model.
        """

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's whole state dict on the CPU, under the names of `model.state_dict()`.

        Args:
            model: A model for which `holds` is true.
        """


_holders: list[OffloadedWeights] = []


def register(holder: OffloadedWeights) -> None:
    """Make a holder known; registering it twice is not an error."""
    if holder not in _holders:
        _holders.append(holder)


def find(model: nn.Module) -> OffloadedWeights | None:
    """Find who holds weights of a model."""
    for holder in _holders:
        if holder.holds(model):
            return holder
    return None


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state dict, wherever its weights live."""
    holder = find(model)
    return dict(model.state_dict()) if holder is None else holder.state_dict(model)
