"""Logged values, sorted by what a tracker's library can do with them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_trackers.flatten import Scalar, as_scalar, flatten, free_name, is_storable


@dataclass
class Parts:
    """Values of one call.

    Attributes:
        numbers: Numbers and truths by name.
        texts: Texts by name, and everything that is neither a number nor understood by the library, as its text.
        groups: Mappings of numbers by name, if they were requested.
        natives: Values that the library understands by itself.
    """

    numbers: dict[str, bool | int | float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    groups: dict[str, dict[str, bool | int | float]] = field(default_factory=dict)
    natives: dict[str, Any] = field(default_factory=dict)


def sort(values: Mapping[str, Any], native: Iterable[str] = (), groups: bool = False) -> Parts:
    """Sort values; nothing raises and nothing is left out."""
    parts = Parts()
    packages = frozenset(native)
    for name, value in values.items():
        _place(str(name), value, packages, groups, parts)
    return parts


def _place(name: str, value: object, native: frozenset[str], groups: bool, parts: Parts) -> None:
    scalar = as_scalar(value)
    if isinstance(scalar, str):
        parts.texts[_free(name, parts)] = scalar.encode("utf-8", "backslashreplace").decode()
    elif is_storable(scalar):
        parts.numbers[_free(name, parts)] = scalar
    elif _is_native(value, native):
        parts.natives[_free(name, parts)] = value
    elif isinstance(value, Mapping) and value:
        numbers = {str(key): as_scalar(item) for key, item in value.items()}
        if (
            groups
            and len(numbers) == len(value)
            and all(isinstance(item, bool | int | float) for item in numbers.values())
        ):
            group = {key: item for key, item in numbers.items() if not isinstance(item, str | None)}
            parts.groups[_free(name, parts)] = group
            return
        for key, item in value.items():
            _place(f"{name}/{key}", item, native, groups, parts)
    else:
        for path, shown in flatten(value).items():
            full = _free(f"{name}/{path}" if path else name, parts)
            if isinstance(shown, str):
                parts.texts[full] = shown
            else:
                parts.numbers[full] = shown


def _free(name: str, parts: Parts) -> str:
    """Return a name that no other value has: of `{"a": {"b": 1}, "a/b": 2}` the second is `a/b (2)`."""
    return free_name(name, ChainMap[str, Any](parts.numbers, parts.texts, parts.groups, parts.natives))


def _is_native(value: object, native: frozenset[str]) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_native(item, native) for item in value)
    return type(value).__module__.partition(".")[0] in native


def config_table(config: object) -> dict[str, Scalar]:
    """Make a table of a configuration, in which every value has a name."""
    return {path or "value": value for path, value in flatten(config).items()}
