"""The one reader of environment variables.

Everything that accel learns from its environment passes through here, so that a spelling, a default or a precedence
is decided once. Nothing in this file imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from accel_core.errors import ConfigurationError, expect_one_of

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a word as truth.

    Raises:
        ConfigurationError: The word is neither.
    """
    word = str(value).lower()
    if word in _TRUE:
        return True if to_bool else 1
    if word in _FALSE:
        return False if to_bool else 0
    raise ConfigurationError(
        f"A yes-or-no value cannot be read; got {value!r}. Use one of {sorted(_TRUE)} or {sorted(_FALSE)}."
    )


def text(name: str, default: str | None = None) -> str | None:
    """Return the variable as text, or `default` where it is not set."""
    return os.environ.get(name, default)


def flag(name: str, default: bool = False) -> bool:
    """Return the variable as truth, or `default` where it is not set or empty.

    Raises:
        ConfigurationError: It is set to a word that is neither yes nor no.
    """
    value = os.environ.get(name)
    if value is None or value == "":
        return default
    try:
        return bool(str_to_bool(value))
    except ConfigurationError as error:
        raise ConfigurationError(f"Environment variable {name}: {error}") from None


def integer(name: str, default: int | None = None) -> int | None:
    """Return the variable as a whole number, or `default` where it is not set or empty; refuse anything else."""
    value = os.environ.get(name)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(
            f"Environment variable {name} must be a whole number; got {value!r}. Set it to digits or unset it."
        ) from None


def choice(name: str, allowed: Iterable[str], default: str) -> str:
    """Return the variable in lower case, checked against `allowed`, or `default` where it is not set or empty."""
    value = (os.environ.get(name) or default).lower()
    expect_one_of(allowed, name, value)
    return value


def with_prefix(prefix: str) -> dict[str, str]:
    """Return all variables whose names start with `prefix`."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment, to hand to a child process."""
    return dict(os.environ)


def write(name: str, value: object) -> None:
    """Set a variable of this process."""
    os.environ[name] = str(value)


def remove(name: str) -> None:
    """Unset a variable of this process; a missing one is fine."""
    os.environ.pop(name, None)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside the block; afterwards it is as it was before.

    Yields:
        Nothing; the environment is empty meanwhile.

    Examples:
        >>> import os
        >>> with clear_environment():
        ...     "PATH" in os.environ
        False
    """
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set variables inside the block; afterwards these names are as they were before.

    Args:
        **kwargs: Names (written in upper case) and values (written as text).

    Yields:
        Nothing; the variables are set meanwhile.

    Examples:
        >>> import os
        >>> with patch_environment(accelerate_mixed_precision="bf16"):
        ...     os.environ["ACCELERATE_MIXED_PRECISION"]
        'bf16'
    """
    values = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)
