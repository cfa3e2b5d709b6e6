"""Dataclasses that are quick to define.

The standard decorator compiles a constructor, a comparison, a hash, a representation and, for a frozen class, two more
methods for every class, which was a third of what the import of this package cost. Here all classes share one of each,
and a constructor is compiled when it is first used.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

__all__ = ["LateInit", "record", "takes"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")


def _compared(self: Any) -> tuple[object, ...]:
    return tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.compare)


def _equal(self: Any, other: object) -> object:
    return _compared(self) == _compared(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _represent(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _is_frozen(self: Any, name: str) -> bool:
    """Return whether an attribute cannot change: any of the class itself, only the fields of a subclass."""
    return vars(type(self)).get("__setattr__") is _set or name in {field.name for field in dataclasses.fields(self)}


def _set(self: object, name: str, value: object) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


class LateInit:
    """Stands for the constructor of a dataclass until somebody asks for it, and puts the real one in its place."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._module = owner.__module__  # where its annotations are resolved, whatever the class is named after later

    def __get__(self, instance: object, _: type | None = None) -> object:
        made = self.make()
        return made if instance is None else MethodType(made, instance)

    def make(self) -> FunctionType:
        """Let the standard decorator compile a constructor for the same fields."""
        owner = self._owner
        fields = owner.__dataclass_fields__
        body: dict[str, Any] = {name: _copy(field) for name, field in fields.items()}
        body["__annotations__"] = {name: field.type for name, field in fields.items()}
        body["__module__"], body["__doc__"] = self._module, owner.__doc__
        if hasattr(owner, "__post_init__"):
            body["__post_init__"] = owner.__post_init__
        frozen = owner.__dataclass_params__.frozen
        twin: type = dataclasses.dataclass(frozen=frozen, repr=False, eq=False)(type(owner.__name__, (), body))
        made: FunctionType = vars(twin)["__init__"]
        made.__qualname__ = f"{owner.__qualname__}.__init__"
        if vars(owner).get("__init__") is self:
            owner.__init__ = made
        return made


def _copy(field: dataclasses.Field[Any]) -> object:
    """Return a field as it was declared."""
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory, init=field.init, kw_only=field.kw_only)
    return dataclasses.field(default=field.default, init=field.init, kw_only=field.kw_only)


if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(cls: object = None, /, *, frozen: bool = False) -> object:
        """Make a dataclass of a class; see `dataclasses.dataclass`."""
        if cls is None:
            return lambda cls: record(cls, frozen=frozen)
        # As the standard decorator does: what can change has no hash.
        shared = {"__eq__": _equal, "__hash__": _hash if frozen else None, "__repr__": _represent}
        # The standard decorator refuses to mix frozen classes with others that are not, so it has to see both as
        # frozen.
        alone = frozen and not any(dataclasses.is_dataclass(base) for base in cls.__mro__[1:])
        for name, function in shared.items():
            if name not in vars(cls):
                setattr(cls, name, function)
        made = dataclasses.dataclass(init=False, frozen=frozen and not alone, repr=False, eq=False)(cls)
        if alone:
            made.__setattr__ = _set
            made.__dataclass_params__.frozen = True
        if "__init__" not in vars(cls):
            made.__init__ = LateInit(made)
        return made


def takes(kind: Callable[_P, _R]) -> Callable[[Callable[[_S, _R], None]], Callable[Concatenate[_S, _P], None]]:
    """Let a constructor have the fields of a dataclass as its arguments, which it is given as one object."""

    def decorate(constructor: Callable[[_S, _R], None]) -> Callable[Concatenate[_S, _P], None]:
        def init(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            constructor(self, kind(*args, **kwargs))

        functools.update_wrapper(init, constructor)
        own, fields = inspect.signature(constructor), inspect.signature(kind)
        itself = next(iter(own.parameters.values()))
        init.__signature__ = own.replace(parameters=[itself, *fields.parameters.values()])  # type: ignore[attr-defined]
        vars(kind)["__init__"].__qualname__ = constructor.__qualname__  # named by the error of a wrong call
        return init

    return decorate
