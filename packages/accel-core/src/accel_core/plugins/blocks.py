"""The blocks of a model, found by the names of their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of that name among a module and everything below it."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
