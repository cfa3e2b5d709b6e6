"""Names: of objects in messages, and dotted ones that lead to a value."""

from __future__ import annotations

from functools import reduce
from typing import Any


def get_pretty_name(obj: object) -> str:
    """Return a name to show for an object: its own, or that of its class, or its text."""
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = obj.__class__
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    return str(obj) if name is None else str(name)


def recursive_getattr(obj: object, attr: str) -> Any:
    """Return the attribute that a dotted name leads to.

    Raises:
        AttributeError: A part of the name is missing.
    """
    return reduce(getattr, attr.split("."), obj)
