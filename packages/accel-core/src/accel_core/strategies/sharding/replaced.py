"""What parameters have besides values, where sharding or splitting makes new ones of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accel_core._torch import has_gradient_hooks
from accel_core.errors import PreparationError

__all__ = ["refuse_hooks"]

_SHOWN = 8


def refuse_hooks(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse hooks on parameters that training will no longer use, because they would never be called.

    They are not carried over: nobody can tell whether a hook made for a whole gradient is right for a part of it.

    Args:
        parameters: Those that will be replaced, with their names.

    Raises:
        PreparationError: Some have hooks.
    """
    found = [name for name, parameter in parameters if has_gradient_hooks(parameter)]
    if found:
        raise PreparationError(
            "Preparing replaces parameters, and hooks of the old ones would never be called; got hooks of "
            f"{_listed(found)}. Remove them, and change gradients between accelerator.backward() and optimizer.step(), "
            "where each rank has its part of the reduced gradient."
        )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
