"""Nests: tensors inside lists, tuples, named tuples and mappings of any depth.

A batch, a model's output or a metric is a nest. Everything that accel does to tensors it does to nests, and the type
of each container is kept: a `UserDict`-like batch comes back as one, with its own attributes.
"""

from __future__ import annotations

import copy
import enum
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from accel_core.errors import PartView, UnsupportedTypeError

TreeSpec = tuple[Any, ...]
"""Containers of a nest in reading order: a leaf is 0, a sequence its length, a mapping the tuple of its keys."""


def is_torch_tensor(tensor: object) -> bool:
    """Return whether `tensor` is a `torch.Tensor`."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: object) -> bool:
    """Return whether `data` is a named tuple: a tuple whose class names its fields.

    >>> from collections import namedtuple
    >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
    (True, False)
    """
    fields = getattr(data, "_fields", None)
    return isinstance(data, tuple) and isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Create a sequence of the same class as `obj`."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def honor_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Create a mapping like `data` that holds other items, keeping the other attributes of `data`."""
    kind = type(data)
    if kind is dict:
        return items
    if isinstance(data, dict | UserDict):
        twin = copy.copy(data)
        for key, value in items.items():
            twin[key] = value
        return twin
    return kind(items)  # type: ignore[call-arg]


def rebuild(container: Any, items: list[Any] | dict[Any, Any]) -> Any:
    """Create a container like another from new items."""
    if isinstance(items, dict):
        return honor_mapping(container, items)
    return items if type(container) is list else honor_type(container, items)


def tree_map(function: Callable[..., Any], nest: object, *others: Any) -> Any:
    """Apply a function to every leaf of a nest, keeping the containers.

    Raises:
        ValueError: Sequences at one place differ in length.

    Example:
        >>> tree_map(lambda a, b: a + b, {"x": [1, (2,)]}, {"x": [10, (20,)]})
        {'x': [11, (22,)]}
    """
    if isinstance(nest, tuple | list):
        return rebuild(nest, [tree_map(function, *parts) for parts in zip(nest, *others, strict=True)])
    if isinstance(nest, Mapping):
        items = {key: tree_map(function, value, *(each[key] for each in others)) for key, value in nest.items()}
        return rebuild(nest, items)
    return function(nest, *others)


def tree_leaves(nest: object) -> Iterator[Any]:
    """Yield each leaf of a nest in reading order."""
    for _, leaf in leaf_paths(nest):
        yield leaf


def recursively_apply(
    func: Callable[..., Any],
    data: object,
    *args: object,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Any:
    """Apply a function to every leaf of a nest that passes a test, keeping the containers.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: The nest: lists, tuples, named tuples and mappings around leaves.
        *args: Passed on to `func`.
        test_type: Returns whether an object is a leaf to apply `func` to.
        error_on_other_type: Refuse other leaves; otherwise they stay as they are.
        **kwargs: Passed on to `func`.

    Returns:
        A nest of the same containers with the results.

    Raises:
        UnsupportedTypeError: `error_on_other_type` holds and a leaf does not pass the test.

    Examples:
        >>> recursively_apply(lambda tensor: tensor * 2, {"values": torch.ones(2), "name": "a"})
        {'values': tensor([2., 2.]), 'name': 'a'}
    """

    def apply(leaf: object) -> object:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise UnsupportedTypeError(
                f"A nest for `{getattr(func, '__name__', func)}` may hold only what "
                f"`{getattr(test_type, '__name__', test_type)}` accepts; got {type(leaf)}. "
                "Take this value out of the nest, or make a tensor of it."
            )
        return leaf

    return tree_map(apply, data)


def flatten(data: object, operation: str) -> tuple[list[torch.Tensor], TreeSpec]:
    """Take a nest of tensors apart.

    Raises:
        UnsupportedTypeError: A leaf is not a tensor.
    """
    # Not by `tree_map`: this runs for every gather of a training loop, where a call for each leaf costs as much as
    # sending it.
    leaves: list[torch.Tensor] = []
    tokens: list[Any] = []
    _collect(data, leaves, tokens, operation)
    return leaves, tuple(tokens)


def _collect(data: object, leaves: list[torch.Tensor], tokens: list[Any], operation: str) -> None:
    if isinstance(data, torch.Tensor):
        leaves.append(data)
        tokens.append(0)
        return
    if isinstance(data, tuple | list):
        tokens.append((len(data),))
        items: Iterable[object] = data
    elif isinstance(data, Mapping):
        tokens.append(("keys", *data))
        items = data.values()
    else:
        raise UnsupportedTypeError(
            f"`{operation}` works on tensors in lists, tuples and mappings; got a leaf of {type(data)}. "
            "Take this value out of the nest, make a tensor of it, or use gather_object."
        )
    for item in items:
        if type(item) is torch.Tensor:
            leaves.append(item)
            tokens.append(0)
        else:
            _collect(item, leaves, tokens, operation)


def unflatten(data: Any, leaves: Iterator[torch.Tensor]) -> Any:
    """Replace the tensors of a nest by new ones."""
    if isinstance(data, torch.Tensor):
        return next(leaves)
    if isinstance(data, tuple | list):
        items = [next(leaves) if type(item) is torch.Tensor else unflatten(item, leaves) for item in data]
        return rebuild(data, items)
    filled = {
        key: next(leaves) if type(item) is torch.Tensor else unflatten(item, leaves) for key, item in data.items()
    }
    return rebuild(data, filled)


def leaf_paths(data: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a nest with the expression that leads to it, such as `['image'][0]`."""
    if isinstance(data, tuple | list):
        for index, item in enumerate(data):
            yield from leaf_paths(item, f"{path}[{index}]")
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaf_paths(value, f"{path}[{key_text(key)}]")
    else:
        yield path, data


def key_text(key: object) -> str:
    """Write a mapping's key, the same way in every process."""
    if isinstance(key, enum.Enum):
        return str(key)
    if key is None or isinstance(key, str | bytes | int | float):
        return repr(key)
    if isinstance(key, tuple):
        return "(" + ", ".join(key_text(part) for part in key) + ")"
    return f"<{type(key).__qualname__}>"


def spec_text(spec: TreeSpec) -> str:
    """Write the containers of a nest, the same way in every process."""
    return " ".join(
        "." if token == 0 else key_text(token[1:]) if token[:1] == ("keys",) else f"[{token[0]}]" for token in spec
    )


def view_of(nest: object) -> dict[str, PartView]:
    """Describe each part of a nest for an error message."""
    return {
        path: PartView(str(leaf.dtype).removeprefix("torch."), _shape_of(leaf))
        if isinstance(leaf, torch.Tensor)
        else PartView(type(leaf).__name__)
        for path, leaf in leaf_paths(nest)
    }


def _shape_of(leaf: torch.Tensor) -> tuple[int, ...] | None:
    """Return a shape; a nested tensor has none."""
    return None if leaf.is_nested else tuple(leaf.shape)
