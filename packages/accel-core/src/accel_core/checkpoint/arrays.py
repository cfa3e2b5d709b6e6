"""NumPy's arrays and numbers in pickled objects, made from a name, a shape and bytes.

What accel writes holds none; the random states of Accelerate and the states of users' objects may. NumPy's own
`__setstate__` trusts its input, so torch's list gets the functions of this module for the names that NumPy writes.
"""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pickle import UnpicklingError
from typing import Any

_DTYPE = re.compile(r"(?:[biufc][1-9]\d?|[SU][1-9]\d{0,8})", re.ASCII)
"""Booleans, integers, floats, complex numbers, and texts of a fixed length: what holds no pointers."""


class _Dtype:
    """A dtype as a file names it."""

    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        """Take the byte order out of a state that is what NumPy writes for this dtype, but for its version."""
        for order in ("|", "<", ">"):
            dtype = self.dtype.newbyteorder(order)
            if type(state) is tuple and repr(dtype.__reduce__()[2][1:]) == repr(state[1:]):
                self.dtype = dtype
                return
        raise UnpicklingError(f"Unsupported class: NumPy's dtype {self.dtype} with a state that NumPy does not write")


class Array:
    """An array that is being read."""

    content: Any = None  # the array; `None` until its state was read

    def __setstate__(self, state: Any) -> None:
        """Make the array from what NumPy writes of it."""
        _, shape, dtype, fortran, raw = state
        values = _values(dtype, raw)
        if self.content is not None or type(shape) is not tuple or any(type(size) is not int for size in shape):
            raise UnpicklingError("damaged array: a shape that is not one")
        # `frombuffer` cannot be written to, so what follows copies.
        placed = values.reshape(shape, order="F" if fortran else "C")
        self.content = placed.astype(values.dtype.newbyteorder("="), order="K", copy=True)


def _values(named: Any, raw: Any) -> Any:
    if type(named) is not _Dtype or type(raw) is not bytes:
        raise UnpicklingError("Unsupported class: an array that is not made from a dtype and bytes")
    import numpy as np

    return np.frombuffer(raw, named.dtype)


def _dtype(name: Any, align: object = False, copy: object = True) -> _Dtype:
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise UnpicklingError(f"Unsupported class: NumPy's dtype {name!r:.40}; only numbers and fixed texts are read")
    import numpy as np

    made = _Dtype()
    made.dtype = np.dtype(name)
    return made


def _array(*_: object) -> Array:
    """Make an array whose state follows; the type, shape and dtype that the file names here do not matter."""
    return Array()


def _scalar(dtype: Any, raw: Any = None) -> object:
    values = _values(dtype, raw)
    if values.size != 1:
        raise UnpicklingError("damaged number: of another length than its dtype")
    return values[0]


def _no_bytes() -> bytes:
    """Return how protocol 2 writes the bytes of an array without elements."""
    return b""


@functools.cache
def stand_ins() -> tuple[Any, ...]:
    """Return what torch's list gets for the names that NumPy writes; none of NumPy's own is among it."""
    if find_spec("numpy") is None:
        return ()
    named = [(_dtype, "numpy.dtype"), ("numpy.ndarray", "numpy.ndarray"), (_no_bytes, "builtins.bytes")]
    for core in ("core", "_core"):
        named += [(_array, f"numpy.{core}.multiarray._reconstruct"), (_scalar, f"numpy.{core}.multiarray.scalar")]
    # torch sets the state of what is on its list only; no file can name these, as names in files have a dot.
    return (*named, (_Dtype, "dtype"), (Array, "array"))
