"""NumPy's arrays and scalars in pickled objects, rebuilt without believing what the file says of their dtype.

NumPy's own `dtype.__setstate__` and `ndarray.__setstate__` trust their input: a dtype whose state was written by hand
turns bytes of the file into pointers, or lets an array end behind its memory. So a file never reaches them. What it
names as `numpy.dtype` is a record of a name, whose state is compared with the one that NumPy writes for that name, and
never set; arrays and scalars are made from that name, a shape and bytes, whose lengths have to agree.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any, Literal

import torch

__all__ = ["finished", "only_safe_globals", "tensor_of_array"]

_DTYPE = re.compile(r"(?:[biufc][1-9]\d?|[SU][1-9]\d{0,8})", re.ASCII)
"""Booleans, integers, floats, complex numbers, and texts of a fixed length: what holds no pointers."""

_MOST_ELEMENTS = 1 << 48
_BYTE_ORDERS: tuple[Literal["|", "<", ">"], ...] = ("|", "<", ">")


def numpy_loadable() -> bool:
    """Return whether NumPy is imported already or can be."""
    if "numpy" in sys.modules:
        return True
    try:
        import numpy as np  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def only_safe_globals(extra: list[Any]) -> Iterator[None]:
    """Let `torch.load(weights_only=True)` rebuild NumPy's arrays with the functions of this module only.

    What the user declared with `torch.serialization.add_safe_globals` stays allowed, except NumPy's own functions and
    types: those would set the state of a dtype.
    """
    before = torch.serialization.get_safe_globals()
    allowed = [one for one in [*before, *extra] if not _is_numpys(one)]
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([*allowed, *(_rebuilders() if numpy_loadable() else ())])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def finished(content: object) -> object:
    """Return loaded content with each array in it as a plain `numpy.ndarray` that owns its memory.

    Lists, dicts and attributes are changed in place; a tuple that held an array is replaced.
    """
    return _finish(content, {})


def _finish(value: Any, done: dict[int, tuple[Any, Any]]) -> object:
    """Finish one value; `done` keeps every value that was met alive, so that no id is used again."""
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, torch.Tensor):
        return value
    if "numpy" in sys.modules and type(value) is _array_type():
        if not value.filled:
            raise UnpicklingError("damaged array: without its bytes")
        made = sys.modules["numpy"].array(value, copy=True, subok=False)
        done[id(value)] = (value, made)
        return made
    if type(value) is tuple:
        items = tuple(_finish(item, done) for item in value)
        made = value if all(new is old for new, old in zip(items, value, strict=True)) else items
        done[id(value)] = (value, made)
        return made
    done[id(value)] = (value, value)
    if isinstance(value, list):
        value[:] = [_finish(item, done) for item in value]
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            value[key] = _finish(item, done)
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict:
        if isinstance(value, dict) and any(hasattr(type(value), name) for name in attributes):
            raise UnpicklingError("Unsupported class: a mapping with attributes that hide its methods")
        for name, item in list(attributes.items()):
            attributes[name] = _finish(item, done)
    return value


def tensor_of_array(array: Any) -> torch.Tensor:
    """Return a tensor made from an array that is being read, with its own memory.

    Raises:
        UnpicklingError: It is no such array, or its bytes were not read.
    """
    if "numpy" not in sys.modules or type(array) is not _array_type() or not array.filled:
        raise UnpicklingError("Unsupported class: a tensor made from something else than an array")
    return torch.from_numpy(sys.modules["numpy"].array(array, copy=True, subok=False))


def _is_numpys(entry: object) -> bool:
    """Return whether an entry of torch's list is NumPy's, under its own name or another."""
    what, name = entry if isinstance(entry, tuple) else (entry, "")
    homes = (str(name), str(getattr(what, "__module__", "") or ""))
    return any(home.split(".")[0] == "numpy" for home in homes)


class _PlainDtype:
    """The name of a dtype, as a file gives it; never a dtype."""

    __slots__ = ("_name", "_order")
    _name: str
    _order: str

    def __new__(cls) -> _PlainDtype:
        raise UnpicklingError("Unsupported class: a dtype without a name")

    @classmethod
    def named(cls, name: object, align: object = False, copy: object = True) -> _PlainDtype:
        """Take the arguments that NumPy writes for a dtype."""
        if type(name) is not str or not _DTYPE.fullmatch(name):
            shown = repr(name[:40]) if type(name) is str else f"of a {type(name).__name__}"
            raise UnpicklingError(f"Unsupported class: NumPy's dtype {shown}; only numbers and fixed texts are read")
        made = object.__new__(cls)
        made._name, made._order = name, ""
        made.resolve()
        return made

    def __setstate__(self, state: object) -> None:
        """Take the byte order out of a state that is, word for word, what NumPy writes for this name."""
        for order in _BYTE_ORDERS:
            if type(state) is tuple and self._written(order) == _trimmed(state):
                self._order = order if order != "|" else ""
                return
        raise UnpicklingError(f"Unsupported class: NumPy's dtype {self._name!r} with a state that NumPy does not write")

    def _written(self, order: Literal["|", "<", ">"]) -> object:
        import numpy as np

        return _trimmed(np.dtype(self._name).newbyteorder(order).__reduce__()[2])

    def resolve(self) -> object:
        """Return NumPy's own dtype of this name."""
        import numpy as np

        try:
            return np.dtype(self._order + self._name)
        except TypeError as error:
            raise UnpicklingError(f"Unsupported class: NumPy has no dtype {self._name!r}") from error


def _trimmed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a dtype's state without its version, which differs between NumPys, and with its types, as 1 == True."""
    return tuple((type(item), item if isinstance(item, (int, str, type(None))) else None) for item in state[1:])


def _rebuild_scalar(dtype: object, content: Any = None) -> object:
    """Make a scalar from the name of its dtype and its bytes."""
    resolved = _resolved(dtype)
    _check_length(content, resolved.itemsize)
    import numpy as np

    return np.frombuffer(content, resolved)[0]


def _resolved(dtype: object) -> Any:
    if type(dtype) is not _PlainDtype:
        raise UnpicklingError(f"Unsupported class: an array with a {type(dtype).__name__} for its dtype")
    return dtype.resolve()


def _check_length(content: object, wanted: int) -> None:
    if type(content) is not bytes or len(content) != wanted:
        found = f"{len(content)} bytes" if type(content) is bytes else type(content).__name__
        raise UnpicklingError(f"damaged array: {found} where its shape and dtype need {wanted} bytes")


def _no_bytes() -> bytes:
    return b""


def _no_constructor(*arguments: object) -> object:
    """Stand for `numpy.ndarray`, whose constructor gives memory that nobody wrote."""
    raise UnpicklingError("Unsupported class: an array that is not made from its bytes")


@functools.cache
def _array_type() -> Any:
    """Return the type of arrays that are being read; only its own `__setstate__` fills one."""
    import numpy as np

    class ArrayBeingRead(np.ndarray):
        filled = False

        def __new__(cls) -> Any:
            return np.ndarray.__new__(cls, (0,), np.uint8)

        def __setstate__(self, state: object) -> None:
            if self.filled or type(state) is not tuple or len(state) != 5:
                raise UnpicklingError("damaged array: a state that NumPy does not write")
            _, shape, dtype, fortran, content = state
            resolved, count = _resolved(dtype), 1
            whole = type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)
            for size in shape if whole else ():
                count *= size or 1
            if not whole or count > _MOST_ELEMENTS or type(fortran) is not bool:
                raise UnpicklingError("damaged array: a shape that is not one")
            _check_length(content, 0 if 0 in shape else count * resolved.itemsize)
            super().__setstate__((1, shape, resolved, fortran, content))  # type: ignore[arg-type]
            self.filled = True

    return ArrayBeingRead


def _rebuild_array(kind: object = None, shape: object = None, code: object = None) -> object:
    """Make an empty array, which its state fills; the type, shape and dtype that the file names here do not matter."""
    if kind is not _no_constructor:
        raise UnpicklingError("Unsupported class: an array of another type than numpy.ndarray")
    return _array_type()()


@functools.cache
def _rebuilders() -> tuple[tuple[Callable[..., Any], str], ...]:
    """Return what stands in this module for the names that NumPy writes."""
    names: list[tuple[Callable[..., Any], str]] = [
        (_PlainDtype.named, "numpy.dtype"),
        (_no_constructor, "numpy.ndarray"),
        (_no_bytes, "builtins.bytes"),  # how protocol 2 writes the bytes of an array without elements
        (_PlainDtype, f"{__name__}._PlainDtype"),  # torch asks whether an object's type is on the list before BUILD
        (_array_type(), f"{__name__}.ArrayBeingRead"),
    ]
    for core in ("core", "_core"):
        names.append((_rebuild_array, f"numpy.{core}.multiarray._reconstruct"))
        names.append((_rebuild_scalar, f"numpy.{core}.multiarray.scalar"))
    return tuple(names)
