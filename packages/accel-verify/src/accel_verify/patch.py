"""Replaces members of classes and modules in the process of a watched script."""

from __future__ import annotations

import functools
from collections.abc import Callable


def replace(owner: object, name: str, value: object) -> None:
    """Replace a member of a class or module."""
    setattr(owner, name, value)


def wrap(owner: object, name: str, around: Callable[..., object]) -> None:
    """Replace a function of a class or module by one that passes the original, then its own arguments, to `around`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        return around(original, *args, **kwargs)

    replace(owner, name, wrapped)
