"""Copies of logged values, taken when they are logged: what a training step changes later is not logged."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from typing import TypeVar, cast

import torch

_T = TypeVar("_T")
_DEEPEST = 20


def snapshot(value: _T) -> _T:
    """Copy what may change: tensors, arrays and the containers that hold them."""
    return cast(_T, _copied(value, depth=0))


def _copied(value: object, depth: int) -> object:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if depth < _DEEPEST:
        if isinstance(value, dict) and kind is dict:
            return {key: _copied(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple) and kind in (list, tuple):
            return kind(_copied(item, depth + 1) for item in value)
        if isinstance(value, dict | set | deque | bytearray) or dataclasses.is_dataclass(kind):
            return _of_its_class(value, depth)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return copy.copy(value)
    return value


def _of_its_class(value: object, depth: int) -> object:
    """Copy a container of another class, such as a Counter or a dataclass that a loop goes on counting in."""
    try:
        copied = copy.copy(value)
    except Exception:  # a user's class may refuse to be copied, and logging must not raise for it
        return value
    if isinstance(copied, dict):
        dict.update(copied, {key: _copied(item, depth + 1) for key, item in dict.items(copied)})
    return copied
