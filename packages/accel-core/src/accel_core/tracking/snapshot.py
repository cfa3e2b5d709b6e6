"""Copies of logged values, taken when they are logged: what a training step changes later is not logged."""

from __future__ import annotations

from typing import TypeVar

import torch

__all__ = ["snapshot"]

_T = TypeVar("_T")
_DEEPEST = 20


def snapshot(value: _T) -> _T:
    """Copy what may change: tensors, arrays and the containers that hold them."""
    return _copied(value, depth=0)  # type: ignore[return-value]


def _copied(value: object, depth: int) -> object:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if depth < _DEEPEST:
        if isinstance(value, dict) and kind is dict:
            return {key: _copied(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple) and kind in (list, tuple):
            return kind(_copied(item, depth + 1) for item in value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return value.copy()  # type: ignore[attr-defined]
    return value
