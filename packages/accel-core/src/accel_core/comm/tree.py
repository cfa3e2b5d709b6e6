"""Nests: tensors inside lists, tuples, named tuples and mappings of any depth.

A batch, a model's output or a metric is a nest. Everything that accel does to tensors it does to nests, and the type
of each container is kept: a `UserDict`-like batch comes back as one, with its own attributes.
"""

from __future__ import annotations

import copy
import enum
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from accel_core.errors import PartView, UnsupportedTypeError

__all__ = [
    "TreeSpec",
    "flatten",
    "honor_mapping",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "is_torch_xpu_tensor",
    "key_text",
    "leaf_paths",
    "recursively_apply",
    "spec_text",
    "unflatten",
    "view_of",
]

TreeSpec = tuple[Any, ...]
"""Containers of a nest in reading order: a leaf is 0, a sequence its length, a mapping the tuple of its keys."""


def is_torch_tensor(tensor: Any) -> bool:
    """Tell whether `tensor` is a `torch.Tensor`."""
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Tell whether `tensor` is a `torch.Tensor` that lives on an Intel XPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_namedtuple(data: Any) -> bool:
    """Tell whether `data` is a named tuple: a tuple whose class names its fields.

    >>> from collections import namedtuple
    >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
    (True, False)
    """
    fields = getattr(data, "_fields", None)
    return isinstance(data, tuple) and isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def honor_type(obj: Any, generator: Any) -> Any:
    """Make a sequence of the class of `obj` from the items of `generator`.

    Args:
        obj: A list, tuple, named tuple, or an instance of a class that is made from one iterable.
        generator: The items.
    """
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def honor_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Make a mapping like `data` that holds `items`, keeping what else `data` carries."""
    kind = type(data)
    if kind is dict:
        return items
    if isinstance(data, dict | UserDict):
        twin = copy.copy(data)
        for key, value in items.items():
            twin[key] = value
        return twin
    return kind(items)  # type: ignore[call-arg]


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every leaf of a nest that passes a test, keeping the containers.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: The nest: lists, tuples, named tuples and mappings around leaves.
        *args: Passed on to `func`.
        test_type: Tells whether an object is a leaf to apply `func` to.
        error_on_other_type: Refuse other leaves; otherwise they stay as they are.
        **kwargs: Passed on to `func`.

    Returns:
        A nest of the same containers with the results.

    Raises:
        UnsupportedTypeError: `error_on_other_type` holds and a leaf does not pass the test.
    """
    if isinstance(data, tuple | list):
        return honor_type(
            data,
            (
                recursively_apply(
                    func, item, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
                )
                for item in data
            ),
        )
    if isinstance(data, Mapping):
        return honor_mapping(
            data,
            {
                key: recursively_apply(
                    func, value, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
                )
                for key, value in data.items()
            },
        )
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise UnsupportedTypeError(
            f"A nest for `{getattr(func, '__name__', func)}` may hold only what "
            f"`{getattr(test_type, '__name__', test_type)}` accepts; got {type(data)}. "
            "Take this value out of the nest, or make a tensor of it."
        )
    return data


def flatten(data: Any, operation: str) -> tuple[list[torch.Tensor], TreeSpec]:
    """Take a nest of tensors apart.

    Args:
        data: The nest; every leaf has to be a tensor.
        operation: Name of the operation that needs it, for the error.

    Returns:
        The tensors in reading order, and the containers around them. Sequences of one length are alike whatever
        their class, so are mappings of the same keys.

    Raises:
        UnsupportedTypeError: A leaf is no tensor.
    """
    leaves: list[torch.Tensor] = []
    tokens: list[Any] = []
    _collect(data, leaves, tokens, operation)
    return leaves, tuple(tokens)


def _collect(data: Any, leaves: list[torch.Tensor], tokens: list[Any], operation: str) -> None:
    if isinstance(data, torch.Tensor):
        leaves.append(data)
        tokens.append(0)
        return
    if isinstance(data, tuple | list):
        tokens.append((len(data),))
        items: Any = data
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
    """Put new tensors in the place of those of a nest.

    Args:
        data: A nest that `flatten` took apart.
        leaves: The new tensors, in reading order.
    """
    if isinstance(data, torch.Tensor):
        return next(leaves)
    if isinstance(data, tuple | list):
        items = [next(leaves) if type(item) is torch.Tensor else unflatten(item, leaves) for item in data]
        return items if type(data) is list else honor_type(data, items)
    filled = {
        key: next(leaves) if type(item) is torch.Tensor else unflatten(item, leaves) for key, item in data.items()
    }
    return filled if type(data) is dict else honor_mapping(data, filled)


def leaf_paths(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a nest with the expression that leads to it, such as `['image'][0]`."""
    if isinstance(data, tuple | list):
        for index, item in enumerate(data):
            yield from leaf_paths(item, f"{path}[{index}]")
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaf_paths(value, f"{path}[{key_text(key)}]")
    else:
        yield path, data


def key_text(key: Any) -> str:
    """Write a mapping's key the same way in every process."""
    if isinstance(key, enum.Enum):
        return str(key)
    if key is None or isinstance(key, str | bytes | int | float):
        return repr(key)
    if isinstance(key, tuple):
        return "(" + ", ".join(key_text(part) for part in key) + ")"
    return f"<{type(key).__qualname__}>"


def spec_text(spec: TreeSpec) -> str:
    """Write the containers of a nest the same way in every process."""
    return " ".join(
        "." if token == 0 else key_text(token[1:]) if token[:1] == ("keys",) else f"[{token[0]}]" for token in spec
    )


def view_of(nest: Any) -> dict[str, PartView]:
    """Describe each part of a nest for an error: its path, dtype and shape."""
    return {
        path: PartView(str(leaf.dtype).removeprefix("torch."), _shape_of(leaf))
        if isinstance(leaf, torch.Tensor)
        else PartView(type(leaf).__name__)
        for path, leaf in leaf_paths(nest)
    }


def _shape_of(leaf: torch.Tensor) -> tuple[int, ...] | None:
    """Return a shape; a nested tensor has none."""
    return None if leaf.is_nested else tuple(leaf.shape)
