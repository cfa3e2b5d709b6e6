"""The one walk over nests of containers, for everything that converts a nest."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

__all__ = ["DEEPEST", "Kind", "Path", "walk"]

DEEPEST = 100
"""How deep containers may be nested; anything deeper counts as a leaf."""

Kind = Literal["dict", "list", "tuple", "dataclass"]
Path = tuple[object, ...]

_R = TypeVar("_R")
Leaf = Callable[[Path, object, tuple[int, ...]], _R]
Join = Callable[[Path, object, Kind, list[tuple[object, _R]]], _R]


def walk(value: object, leaf: Leaf[_R], join: Join[_R], path: Path = (), above: tuple[int, ...] = ()) -> _R:
    """Convert a nest, from the leaves upwards.

    Mappings, lists, tuples and dataclasses are containers; the keys of a list are its indices, as text. A container
    that contains itself, is nested too deep or cannot be read is a leaf.
    """
    parts = None if id(value) in above or len(above) >= DEEPEST else _parts(value)
    if parts is None:
        return leaf(path, value, above)
    kind, items = parts
    inside = (*above, id(value))
    return join(path, value, kind, [(key, walk(item, leaf, join, (*path, key), inside)) for key, item in items])


def _parts(value: object) -> tuple[Kind, list[tuple[object, object]]] | None:
    """Return the kind of a container and its items by key, or `None` for a leaf."""
    try:
        if isinstance(value, Mapping):
            return "dict", list(value.items())
        if type(value) is list:
            return "list", [(str(index), item) for index, item in enumerate(value)]
        if type(value) is tuple:
            return "tuple", [(str(index), item) for index, item in enumerate(value)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type | enum.Enum):
            return "dataclass", [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    except BaseException:
        # Logging must not raise, whatever a user's container raises when it is read: it is shown as text.
        return None
    return None
