"""Any configuration as one table of names and plain values, which is what trackers can show."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeGuard

import torch

Scalar = bool | int | float | str
"""Types that every tracker can show."""

_LARGEST = 2**63
_SHORT_TENSOR = 16
_DEEPEST = 100


def flatten(config: object) -> dict[str, Scalar]:
    """Return every leaf of a nest by its dotted path: numbers and texts as they are, anything else as its text.

    Mappings, lists, tuples and dataclasses are nests. An empty one, one that contains itself, and one that is nested
    too deep or cannot be read is a leaf. Of two leaves whose paths are written alike, the second is `path (2)`.

    Example:
        >>> flatten({"lr": 0.1, "model": {"sizes": [3, 4], "init": None}})
        {'lr': 0.1, 'model.sizes.0': 3, 'model.sizes.1': 4, 'model.init': 'None'}
    """
    values: dict[str, Scalar] = {}
    _add(values, "", config, ())
    return values


def _add(values: dict[str, Scalar], path: str, value: object, above: tuple[int, ...]) -> None:
    parts = () if id(value) in above or len(above) >= _DEEPEST else _parts(value)
    if not parts:
        values[free_name(path, values)] = _shown(value)
    for key, item in parts:
        name = _text(key)
        _add(values, f"{path}.{name}" if above else name, item, (*above, id(value)))


def _parts(value: object) -> Iterable[tuple[object, object]]:
    """Return what a nest holds, by key; nothing for a leaf."""
    try:
        if isinstance(value, Mapping):
            return list(value.items())
        if type(value) in (list, tuple):
            return list(enumerate(value))  # type: ignore[arg-type]
        if dataclasses.is_dataclass(value) and not isinstance(value, type | enum.Enum):
            return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    except Exception:  # a user's container may raise anything, and is then shown as text
        return ()
    return ()


def free_name(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: the second `loss` is `loss (2)`."""
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name} ({count})"
    return free


def is_storable(value: object) -> TypeGuard[bool | int | float]:
    """Return whether a value is a number that libraries can store, which have 64 bits for it."""
    return isinstance(value, float) or (isinstance(value, int) and -_LARGEST <= value < _LARGEST)


def _shown(value: object) -> Scalar:
    scalar = as_scalar(value)
    return scalar if is_storable(scalar) else _text(value)


def _text(value: object) -> str:
    """Return the text of a value, without what no tracker can send as UTF-8."""
    try:
        text = _tensor_text(value) if isinstance(value, torch.Tensor) else str(value)
    except Exception as error:  # a user's class may raise anything, and logging must not
        text = f"<{type(value).__name__} whose text raises {type(error).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()


def _tensor_text(value: torch.Tensor) -> str:
    if value.numel() <= _SHORT_TENSOR and value.layout is torch.strided and not value.is_meta:
        return str(value.tolist())
    return f"tensor(shape={tuple(value.shape)}, dtype={value.dtype})"


def as_scalar(value: Any) -> Scalar | None:
    """Return a value as one number or text."""
    if isinstance(value, enum.Enum):
        return None
    if isinstance(value, bool | int | float | str):
        plain = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return plain(value)
    try:
        if isinstance(value, torch.Tensor):
            return as_scalar(value.item()) if value.numel() == 1 and not value.is_meta else None
        if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
            return as_scalar(value.item())
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real):
            return float(value)
    except Exception:
        return None
    return None
