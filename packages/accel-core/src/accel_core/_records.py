"""Dataclasses that are quick to define.

The standard decorator compiles a comparison, a hash and a representation for every class, which was a third of what the
import of this package cost. Here all classes share one of each.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

__all__ = ["record"]


def _compared(self: Any) -> tuple[object, ...]:
    return tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.compare)


def _equal(self: Any, other: Any) -> object:
    return _compared(self) == _compared(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _represent(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(cls: object = None, /, *, frozen: bool = False) -> object:
        """Make a dataclass of a class; see `dataclasses.dataclass`.

        Args:
            cls: The class.
            frozen: Whether its instances cannot be changed, and can be hashed.
        """
        if cls is None:
            return lambda cls: record(cls, frozen=frozen)
        shared = {"__eq__": _equal, "__hash__": _hash if frozen else None, "__repr__": _represent}
        for name, function in shared.items():
            if name not in vars(cls):
                setattr(cls, name, function)
        return dataclasses.dataclass(frozen=frozen, repr=False, eq=False)(cls)
