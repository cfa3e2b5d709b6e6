"""Models whose weights live elsewhere: how the core saves what another package holds, never as empty tensors."""

from collections.abc import Callable

import torch
from torch import nn

holders: list[Callable[[nn.Module], dict[str, torch.Tensor] | None]] = []
"""Of packages that offload weights: each returns a model's whole state dict on the CPU, under the names of
`model.state_dict()`, or `None` where it holds nothing of the model."""


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state dict, wherever its weights live."""
    held = (holder(model) for holder in holders)
    return next((state for state in held if state is not None), None) or dict(model.state_dict())
