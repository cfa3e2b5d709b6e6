"""A pickle of which everything that it names is on a closed list, and of which nothing is run but what is on it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any


class ForeignNameError(ValueError):
    """A pickle names something that is not on the list."""


class Opaque:
    """What stands for a class or function of which nothing is run: what the pickle gives it."""

    state: Any = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


def load_closed(raw: bytes, known: Mapping[str, Any], records: tuple[type, ...]) -> Any:
    """Return what a pickle holds; `known` has what stands for each name, and only `records` are given attributes."""
    reader = _Reader(io.BytesIO(raw))
    reader.known, reader.records = known, (Opaque, *records)
    return reader.load()


# Python's reader in Python: the one in C reserves memory by numbers that the file holds.
class _Reader(pickle._Unpickler):
    stack: list[Any]
    known: Mapping[str, Any]
    records: tuple[type, ...]

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        if f"{module}.{name}" not in self.known:
            raise ForeignNameError(f"{module}.{name}")
        return self.known[f"{module}.{name}"]

    def persistent_load(self, pid: object) -> object:
        """Return the name of something that lies outside of the pickle."""
        return pid

    def load_build(self) -> None:
        """Give a record its attributes, without a method of its own."""
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, self.records):
            raise pickle.UnpicklingError("attributes of what is not a record")
        vars(made).update({"state": state} if isinstance(made, Opaque) else state)

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]
