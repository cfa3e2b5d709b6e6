"""One lossless flattening of any configuration into names and plain values.

Trackers show a table of names and values. `flatten` makes one from any nesting of anything, readable and complete;
`FlatConfig.restore` gives the nesting back, so that nothing is lost by showing it.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

from accel_core._records import record
from accel_trackers import codec
from accel_trackers.nest import Kind, Path, walk

__all__ = ["FlatConfig", "Scalar", "as_scalar", "flatten", "join", "split"]

Scalar = bool | int | float | str
"""Types that every tracker can show."""

_LARGEST = 2**63
_SHORT_TENSOR = 16


@record(frozen=True)
class FlatConfig:
    r"""A configuration as a table.

    Attributes:
        values: Every leaf by its dotted path: booleans, numbers and texts as they are, anything else as readable text.
            In a path, `\.` is a dot inside a key, `\e` an empty key, and `[...]` a key that is not a text.
        kinds: What the table does not show, as JSON values: the kind of a container that is not a mapping, and the
            exact value of a leaf that stands as text.
    """

    values: dict[str, Scalar]
    kinds: dict[str, Any]

    def restore(self) -> object:
        """Return the configuration as it was nested.

        Enumerations, dataclasses and objects of unknown classes come back as `codec.Described`.
        """
        if "" in self.kinds or not (self.values or self.kinds):
            return self._leaf("") if self._is_leaf("") else self._container("", self._tree())
        return self._container("", self._tree())

    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path in self.values:
            *above, last = _segments(path)
            node = tree
            for segment in above:
                node = node.setdefault(segment, {})
            node[last] = _Leaf(path)
        return tree

    def _is_leaf(self, path: str) -> bool:
        kind = self.kinds.get(path)
        return isinstance(kind, dict) and "exact" in kind

    def _leaf(self, path: str) -> object:
        return codec.decode(self.kinds[path]["exact"]) if self._is_leaf(path) else self.values[path]

    def _container(self, path: str, tree: dict[str, Any]) -> object:
        items: dict[object, object] = {}
        for segment, node in tree.items():
            below = join(path, segment)
            item = self._leaf(node.path) if isinstance(node, _Leaf) else self._container(below, node)
            items[_read_key(segment)] = item
        kind = self.kinds.get(path, "dict")
        if kind == "dict":
            return items
        if kind == "list":
            return list(items.values())
        if kind == "tuple":
            return tuple(items.values())
        return codec.Described(kind["dataclass"], "dataclass", items)


@record(frozen=True)
class _Leaf:
    path: str


def flatten(config: object) -> FlatConfig:
    """Flatten a configuration.

    Example:
        >>> flatten({"lr": 0.1, "model": {"sizes": [3, 4], "init": None}}).values
        {'lr': 0.1, 'model.sizes.0': 3, 'model.sizes.1': 4, 'model.init': 'None'}
    """
    values: dict[str, Scalar] = {}
    kinds: dict[str, Any] = {}

    def leaf(path: Path, value: object, _: tuple[int, ...]) -> None:
        _put(_written(path), value, values, kinds)

    def container(path: Path, value: object, kind: Kind, items: list[tuple[object, None]]) -> None:
        if not items:
            _put(_written(path), value, values, kinds)
        elif kind != "dict":
            kinds[_written(path)] = {"dataclass": codec.type_name(value)} if kind == "dataclass" else kind
        elif path:
            kinds[_written(path)] = kind

    walk(config, leaf, container)
    return FlatConfig(values, kinds)


def _written(path: Path) -> str:
    return ".".join(map(_write_key, path))


def _put(path: str, value: object, values: dict[str, Scalar], kinds: dict[str, Any]) -> None:
    values[path] = value if _is_plain(value) else _readable(value)
    if path == "" or not _is_plain(value):
        kinds[path] = {"exact": codec.encode(value)}


def _is_plain(value: object) -> TypeGuard[Scalar]:
    if isinstance(value, str) and type(value) is str:
        # Surrogates, which no tracker can send as UTF-8.
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, int) and type(value) is int:
        return -_LARGEST <= value < _LARGEST  # libraries store 64 bits
    return type(value) in (bool, float)


def _readable(value: object) -> Scalar:
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return str(value).encode("utf-8", "backslashreplace").decode()
    number = as_scalar(value)
    if number is not None and not isinstance(number, str) and _is_plain(number):
        return number
    try:
        text = _tensor_text(value) if isinstance(value, torch.Tensor) else str(value)
    except BaseException:  # a user's class may raise anything, and logging must not
        text = codec.describe(value)
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


def join(path: str, segment: str) -> str:
    """Return the path of a part of the container at `path`."""
    return f"{path}.{segment}" if path else segment


def split(path: str) -> list[object]:
    """Return the keys that a path is made of."""
    return [_read_key(segment) for segment in _segments(path)]


def _segments(path: str) -> Iterator[str]:
    start = position = 0
    while position < len(path):
        if path[position] == "\\":
            position += 1
        elif path[position] == ".":
            yield path[start:position]
            start = position + 1
        position += 1
    yield path[start:]


def _write_key(key: object) -> str:
    if _is_plain(key) and isinstance(key, str):
        text = key.replace("\\", "\\\\").replace(".", "\\.")
        return "\\e" if not text else f"\\{text}" if text[0] == "[" else text
    return "[" + codec.dumps(key).replace("\\", "\\\\").replace(".", "\\.") + "]"


def _read_key(segment: str) -> object:
    if segment.startswith("["):
        return codec.loads(_unescape(segment)[1:-1])
    return "" if segment == "\\e" else _unescape(segment)


def _unescape(text: str) -> str:
    letters = iter(text)
    return "".join(next(letters, "") if letter == "\\" else letter for letter in letters)
