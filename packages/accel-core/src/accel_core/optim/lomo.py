"""LOMO optimizers, which update each parameter as soon as its gradient is known (lomo-optim, arXiv:2306.09782)."""

from __future__ import annotations

import sys
from typing import Any

import torch

from accel_core.errors import PreparationError


def is_lomo(optimizer: object) -> bool:
    """Return whether an optimizer, or the one that it wraps, is `Lomo` or `AdaLomo` of lomo-optim."""
    library = sys.modules.get("lomo_optim")  # whoever made such an optimizer has imported it
    inner = getattr(optimizer, "optimizer", optimizer)
    return library is not None and isinstance(inner, library.Lomo | library.AdaLomo)


def backward(optimizers: list[Any], loss: torch.Tensor, learning_rate: float) -> None:
    """Run the fused backward of the LOMO optimizers among `optimizers`.

    Raises:
        PreparationError: None of them is a LOMO optimizer.
    """
    found = [optimizer.optimizer for optimizer in optimizers if is_lomo(optimizer)]
    if not found:
        raise PreparationError(
            f"lomo_backward needs a prepared LOMO optimizer; got {len(optimizers)} prepared optimizers, none of them "
            "from lomo_optim. Prepare one, or call backward()."
        )
    for optimizer in found:
        optimizer.fused_backward(loss, learning_rate)
