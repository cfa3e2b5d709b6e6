"""Names that are imported when they are first used.

`import accel_core` must cost nothing: torch is loaded when a name that needs it is touched. While modules are loaded
the garbage collector rests: what they make stays, and collections that walk all of it, or all of torch, cost as much as
a good part of the import.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collection() -> Iterator[None]:
    """Let the garbage collector rest inside the block, which makes many objects that stay: modules, nodes of a tree."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextmanager
def while_loading() -> Iterator[None]:
    """Let the garbage collector rest while the block loads modules, and count what they made as old at once."""
    ages = gc.isenabled() and not gc.get_freeze_count()  # what somebody froze, before a fork for instance, stays frozen
    if ages:
        gc.collect(1)  # so that no garbage of the caller's counts as old
    with without_collection():
        yield
        if ages:
            gc.freeze()
            gc.unfreeze()


def attach(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the lazy `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: The package's `__name__`.
        homes: For every public name, the absolute module that defines it, or the package that it is a module of.

    Returns:
        `__getattr__`, `__dir__` and the sorted `__all__`, to be bound at module level.
    """

    def getattr_(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with while_loading():
            module = importlib.import_module(home)
            is_held = home != package and hasattr(module, name)
            value = getattr(module, name) if is_held else importlib.import_module(f"{home}.{name}")
        setattr(sys.modules[package], name, value)  # found there from now on, without `__getattr__`
        return value

    names = sorted(homes)

    def dir_() -> list[str]:
        return sorted({*names, *vars(sys.modules[package])})

    return getattr_, dir_, names
