"""Readers and writers of the environment under Accelerate's names, which accel itself does not use."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from accel_core.host import environ

_F = TypeVar("_F", bound=Callable[..., Any])

_UNSAFE = re.compile(r"[;\n<> ]")
"""What ends a word, a line or a redirection where a shell reads the lines."""

_logger = logging.getLogger(__name__)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first variable of `env_keys` that holds a number of zero or more, else `default`."""
    found = (environ.integer(name, -1) for name in env_keys)
    return next((value for value in found if value is not None and value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the variable `key` as truth, `default` where it is not set."""
    return environ.flag(key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable `key` as text, `default` where it is not set."""
    return str(environ.text(key, str(default)))


def convert_dict_to_env_variables(current_env: Mapping[str, object]) -> list[str]:
    """Write an environment as `NAME=value` lines; an entry that a line cannot hold is left out, with a warning."""
    lines = []
    for name, value in current_env.items():
        if _UNSAFE.search(f"{name}{value}") or "=" in name:  # the first "=" ends a name
            _logger.warning("A line cannot hold the environment variable; got %s=%s. It is left out.", name, value)
        else:
            lines.append(f"{name}={value}\n")
    return lines


def purge_accelerate_environment(func_or_cls: _F) -> _F:
    """Undo, after each call, what a function or the tests of a class did to `ACCELERATE_*` variables."""
    if not inspect.isclass(func_or_cls):
        return _undoing()(func_or_cls)
    _purge_tests_of(func_or_cls)  # and later those of its subclasses
    return func_or_cls


def _purge_tests_of(decorated: Any) -> None:
    own = vars(decorated).get("__init_subclass__")  # the class's own; others are found by super()

    def wrap_tests(cls: type) -> None:
        for name, member in list(vars(cls).items()):  # a copy, as setting changes it
            if name.startswith("test") and inspect.isfunction(member):
                setattr(cls, name, _undoing()(member))

    def wrap_subclass(cls: type, /, **kwargs: object) -> None:
        begin = super(decorated, cls).__init_subclass__ if own is None else own.__get__(None, cls)
        begin(**kwargs)
        wrap_tests(cls)

    wrap_tests(decorated)
    decorated.__init_subclass__ = classmethod(wrap_subclass)


@contextmanager
def _undoing() -> Iterator[None]:
    """Leave the `ACCELERATE_*` variables after the block as they were before it."""
    before = environ.with_prefix("ACCELERATE_")
    try:
        yield
    finally:
        for name in environ.with_prefix("ACCELERATE_").keys() - before.keys():
            environ.remove(name)
        for name, value in before.items():
            environ.write(name, value)
