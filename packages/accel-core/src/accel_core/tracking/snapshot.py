"""Copies of logged values, taken when they are logged: what a training step changes later is not logged."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from contextlib import suppress
from typing import TypeVar, cast

import torch

from accel_core.comm.tree import honor_mapping

_T = TypeVar("_T")


def snapshot(value: _T) -> _T:
    """Copy what may change: tensors, arrays and the containers that hold them."""
    return cast(_T, _copied(value))


def _copied(value: object) -> object:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    with suppress(Exception):  # a user's class may refuse to be copied, and logging must not raise for it
        if isinstance(value, list | tuple) and kind in (list, tuple):
            return kind(_copied(item) for item in value)
        if isinstance(value, dict):
            return honor_mapping(value, {key: _copied(item) for key, item in dict.items(value)})
        if isinstance(value, set | deque | bytearray) or dataclasses.is_dataclass(kind) or kind.__name__ == "ndarray":
            return copy.copy(value)
    return value
