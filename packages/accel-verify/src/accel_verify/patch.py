"""Exchanging members of classes and modules for the process of a script that is watched."""

from __future__ import annotations

import functools
from collections.abc import Callable

__all__ = ["replace", "wrap"]


def replace(owner: object, name: str, value: object) -> None:
    """Exchange a member of a class or module."""
    setattr(owner, name, value)


def wrap(owner: object, name: str, around: Callable[..., object]) -> None:
    """Exchange a function of a class or module for one that gives `around` the original, then its own arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        return around(original, *args, **kwargs)

    replace(owner, name, wrapped)
