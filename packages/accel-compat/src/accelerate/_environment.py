"""Readers and writers of the environment under Accelerate's names, which accel itself does not use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from accel_core.host import environ

__all__ = [
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "purge_accelerate_environment",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first variable of `env_keys` that holds a number of zero or more, else `default`."""
    return environ.first_integer(env_keys, default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the variable `key` as truth, `default` where it is not set."""
    return environ.flag(key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable `key` as text, `default` where it is not set."""
    return str(environ.text(key, str(default)))


def convert_dict_to_env_variables(current_env: Mapping[str, object]) -> list[str]:
    """Write an environment as `NAME=value` lines, leaving out what a line cannot hold.

    Args:
        current_env: Names and values. An entry with a newline, `;` or an equals sign in its name is left out.

    Returns:
        One line an entry, each ending in a newline.
    """
    lines = []
    for name, value in current_env.items():
        if all(char not in f"{name}{value}" for char in ("\n", ";")) and "=" not in name:
            lines.append(f"{name}={value}\n")
    return lines


def purge_accelerate_environment(func_or_cls: _F) -> _F:
    """Undo, after each call, what a function or a class's methods did to `ACCELERATE_*` variables.

    Args:
        func_or_cls: A function, or a class whose own `test*`, `setUp*` and other public methods are wrapped.

    Returns:
        The function wrapped, or the same class with wrapped methods.
    """

    def restore(before: dict[str, str]) -> None:
        for name in set(environ.with_prefix("ACCELERATE_")) - set(before):
            environ.remove(name)
        for name, value in before.items():
            environ.write(name, value)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> Any:
            before = environ.with_prefix("ACCELERATE_")
            try:
                return function(*args, **kwargs)
            finally:
                restore(before)

        return wrapper

    if inspect.isclass(func_or_cls):
        for name, member in list(vars(func_or_cls).items()):
            if inspect.isfunction(member) and not name.startswith("__"):
                setattr(func_or_cls, name, wrap(member))
        return func_or_cls
    return wrap(func_or_cls)  # type: ignore[return-value]
