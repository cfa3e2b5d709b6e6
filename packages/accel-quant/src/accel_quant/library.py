"""bitsandbytes, imported when something is packed: importing it takes seconds, and most runs pack nothing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["bitsandbytes", "is_instance"]


def bitsandbytes() -> Any:
    """Return the library, importing it at the first call."""
    return importlib.import_module("bitsandbytes")


def is_instance(value: object, *names: str) -> bool:
    """Tell whether a value is of a class of `bitsandbytes.nn`; it cannot be where the library was never imported.

    Args:
        value: A parameter or a module.
        *names: Names of classes.
    """
    classes = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    return any(isinstance(value, getattr(classes, name)) for name in names) if classes is not None else False
