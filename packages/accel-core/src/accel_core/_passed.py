"""Attributes of an object that are attributes of something that it holds."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

_T = TypeVar("_T")


class Passed(property, Generic[_T]):
    """A property that reads what is found on a path, such as `layout.rank`; its type is the parameter.

    Args:
        path: Names of attributes, from the object on; or a function that is given the object.
        doc: The docstring.
    """

    def __init__(self, path: str | Callable[[Any], _T], doc: str) -> None:
        super().__init__(*(attrgetter(path), self._writer(path)) if isinstance(path, str) else (path,))
        self.__doc__ = doc

    def _writer(self, path: str) -> Callable[[Any, _T], None] | None:
        return None

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type, /) -> Passed[_T]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> _T: ...
        def __get__(self, instance: object, owner: type | None = None, /) -> object: ...

        def __set__(self, instance: object, value: NoReturn) -> None: ...


class PassedOn(Passed[_T]):
    """Such a property that can be set."""

    def _writer(self, path: str) -> Callable[[Any, _T], None]:
        owner, _, name = path.rpartition(".")
        held = attrgetter(owner)
        return lambda instance, value: setattr(held(instance), name, value)

    if TYPE_CHECKING:

        def __set__(self, instance: object, value: _T) -> None: ...
