"""Logged values, sorted by what a tracker's library can do with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from accel_trackers.flatten import as_scalar, flatten

__all__ = ["DataFrame", "Parts", "config_table", "rows", "sort"]

_LARGEST = 2**63


class DataFrame(Protocol):
    """A data frame of pandas, or what has the same columns and `to_numpy`."""

    @property
    def columns(self) -> Iterable[object]:
        """Names of the columns."""

    def to_numpy(self, dtype: type[object]) -> Any:
        """Return the rows as a numpy array.

        Args:
            dtype: Type of the elements; `object` keeps numbers beside texts.
        """


@dataclass
class Parts:
    """Values of one call.

    Attributes:
        numbers: Numbers and truths by name.
        texts: Texts by name, and everything that is neither a number nor understood by the library, as its text.
        groups: Mappings of numbers by name, where they were asked for.
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
        parts.texts[name] = scalar.encode("utf-8", "backslashreplace").decode()
    elif (scalar is not None and -_LARGEST <= scalar < _LARGEST) or isinstance(scalar, float):
        parts.numbers[name] = scalar
    elif _is_native(value, native):
        parts.natives[name] = value
    elif isinstance(value, Mapping) and value:
        numbers = {str(key): as_scalar(item) for key, item in value.items()}
        if groups and all(isinstance(item, bool | int | float) for item in numbers.values()):
            parts.groups[name] = {key: item for key, item in numbers.items() if not isinstance(item, str | None)}
            return
        for key, item in value.items():
            _place(f"{name}/{key}", item, native, groups, parts)
    else:
        for path, shown in flatten(value).values.items():
            full = f"{name}/{path}" if path else name
            if isinstance(shown, str):
                parts.texts[full] = shown
            else:
                parts.numbers[full] = shown


def _is_native(value: object, native: frozenset[str]) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_native(item, native) for item in value)
    return type(value).__module__.partition(".")[0] in native


def config_table(config: object) -> tuple[dict[str, bool | int | float | str], dict[str, Any]]:
    """Make a table of a configuration, and the document that holds it exactly."""
    flat = flatten(config)
    return {path or "value": value for path, value in flat.values.items()}, {"values": flat.values, "kinds": flat.kinds}


def rows(
    columns: list[str] | None, data: list[list[Any]] | None, dataframe: DataFrame | None
) -> tuple[list[str], list[list[Any]]]:
    """Read a table given as columns and rows, or as a data frame.

    Raises:
        ValueError: Neither is given.
    """
    if dataframe is not None:
        return [str(column) for column in dataframe.columns], dataframe.to_numpy(dtype=object).tolist()
    if data is None or columns is None:
        raise ValueError("A table needs `columns` and `data`, or a `dataframe`; got neither. Pass one of them.")
    return list(columns), [list(row) for row in data]
