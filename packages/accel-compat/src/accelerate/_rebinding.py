"""Modules whose names can be replaced from outside, with effect in the running engine.

Libraries replace globals of Accelerate's modules (`accelerate.data_loader.prepare_data_loader = mine`) and tests patch
them. Here such a module only mirrors the packages underneath, so setting or deleting a name is written through to the
module that defines it and to every engine module that bound the same object.

Names of parts that few runs use come into such a module when somebody asks for them: importing them would be a large
part of what `import accelerate` costs. To set or delete one brings it first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from accel_core import _lazy
from accel_core.host.availability import has_module
from accel_core.options.engines import PUBLIC, bring

_ENGINE = {
    *("accel", "accel_bigmodel", "accel_core", "accel_launch", "accel_plan", "accel_quant"),
    *("accel_trackers", "accel_verify"),
    *(known.module for known in PUBLIC),
}
_OWN = "accelerate._"
"""Modules of the drop-in that define what accel itself has no use for."""

_later: dict[str, dict[str, str]] = {}
"""For a module: the names that come when they are asked for, each with the module that defines it."""

_places: dict[tuple[str, str], set[tuple[str, str]]] = {}
"""For a module and a name that was set or deleted once: the engine's modules and names that follow it."""


class RebindableModule(ModuleType):
    """A module whose set and delete reach the engine."""

    def __getattr__(self, name: str) -> Any:
        """Bring a name that nobody has asked for yet; as `__all__`, return what a star import takes."""
        homes = _later.get(self.__name__, {})
        if name == "__all__" and homes:
            # A star import must not fail for an engine that is absent.
            here = {known for known, home in homes.items() if has_module(home.partition(".")[0])}
            return sorted(known for known in {*here, *vars(self)} if not known.startswith("_"))
        if name not in homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _lazy.while_loading():
            value = getattr(bring(homes[name]), name)
        vars(self)[name] = value  # past `__setattr__`: nothing was replaced
        return value

    def __dir__(self) -> list[str]:
        """Return all names, also those that nobody has asked for yet."""
        return sorted({*vars(self), *_later.get(self.__name__, {})})

    def __setattr__(self, name: str, value: object) -> None:
        """Set a name here and wherever the engine bound the object it stood for."""
        for module, bound in _followers(self, name):
            vars(module)[bound] = value
        super().__setattr__(name, value)  # last, as followers are found by what stands here

    def __delattr__(self, name: str) -> None:
        """Delete a name here and wherever the engine bound the object it stood for."""
        followers = _followers(self, name)  # before it goes, as followers are found by it
        super().__delattr__(name)
        for module, bound in followers:
            vars(module).pop(bound, None)  # another mirror may have deleted it


def write_through(name: str, later: Mapping[str, Sequence[str]] | None = None) -> None:
    """Make an imported module rebindable; one that runs as a program is left as it is.

    Names in `later` come from their modules when they are asked for.
    """
    if name == "__main__":
        return
    if later:
        _later[name] = {each: home for home, found in later.items() for each in found}
    sys.modules[name].__class__ = RebindableModule  # only a module's class can catch setting


def _followers(mirror: ModuleType, name: str) -> list[tuple[ModuleType, str]]:
    """Return the engine's modules and names that are bound to what a mirror's name stands for."""
    waits = name not in vars(mirror) and name in _later.get(mirror.__name__, {})
    if waits and (mirror.__name__, name) not in _places:  # where it is known there, it was deleted
        getattr(mirror, name)
    current = vars(mirror).get(name)
    if name.startswith("__") or isinstance(current, ModuleType):  # the import system sets these
        return []
    # Kept: once replaced, nobody could find them by what they stand for.
    known = _places.setdefault((mirror.__name__, name), set())
    if name in vars(mirror):
        known.update((module.__name__, bound) for module in _engine() for bound in _names(module, name, current))
        _bring(known)
    return [(module, bound) for module_name, bound in known if (module := sys.modules.get(module_name)) is not None]


def _bring(places: set[tuple[str, str]]) -> None:
    """Bring what other mirrors wait for before it is replaced: there, each name keeps what it stands for now."""
    for mirror, homes in _later.items():
        for name, home in homes.items():
            if (home, name) in places and name in vars(sys.modules[home]) and mirror in sys.modules:
                vars(sys.modules[mirror]).setdefault(name, vars(sys.modules[home])[name])


def _engine() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())  # other threads may import meanwhile
        if name.partition(".")[0] in _ENGINE or name.startswith(_OWN)
    ]


def _names(module: ModuleType, name: str, value: object) -> list[str]:
    """Return a module's names for an object; a plain value counts under its own name only."""
    if callable(value):  # equal plain values are often one object, and mean different things
        return [bound for bound, held in vars(module).items() if held is value]
    return [name] if name in vars(module) and vars(module)[name] is value else []
