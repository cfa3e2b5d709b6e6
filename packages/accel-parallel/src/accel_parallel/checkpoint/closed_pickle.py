"""A pickle of which everything that it names is on a closed list of records, of which the attributes are kept."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ForeignNameError", "Record", "load_closed", "record_of"]


class ForeignNameError(ValueError):
    """A pickle names something that is not on the list."""


class Record:
    """An object of which a pickle says the arguments and the attributes; nothing of its class is run."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def record_of(name: str) -> type[Record]:
    """Return a class of records."""
    return type(name, (Record,), {})


def load_closed(raw: bytes, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return what a pickle holds."""
    reader = _Reader(io.BytesIO(raw))
    reader.known, reader.persistent = known, persistent
    return reader.load()


# Python's reader in Python: the one in C reserves memory by numbers that the file holds.
class _Reader(pickle._Unpickler):
    stack: list[Any]
    known: Mapping[str, Any]
    persistent: Callable[[Any], Any] | None

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        if f"{module}.{name}" not in self.known:
            raise ForeignNameError(f"{module}.{name}")
        return self.known[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        """Return what stands for something that lies outside the pickle."""
        if self.persistent is None:
            raise pickle.UnpicklingError("a pickle that refers to something outside of it")
        return self.persistent(pid)

    def load_build(self) -> None:
        """Keep the attributes of a record; nothing else has any."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise pickle.UnpicklingError("attributes of what is not a record")
        self.stack[-1].state = state

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]
