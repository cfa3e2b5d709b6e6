"""Versions of libraries, compared without importing them."""

from __future__ import annotations

import importlib.metadata
import operator
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from accel_core.errors import ConfigurationError

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = ["STR_OPERATION_TO_FUNC", "compare_versions", "installed_version", "is_torch_version"]

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
"""The function behind each sign of comparison."""


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of a library, or a version, with another.

    Args:
        library_or_version: The name of an installed distribution, or a version.
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        requirement_version: What to compare with, such as `"2.1"`. A local part counts: 2.13.0+cpu is above 2.13.0.

    Raises:
        ConfigurationError: The operation is none of these.
        importlib.metadata.PackageNotFoundError: The library is not installed.

    >>> from packaging.version import parse
    >>> compare_versions(parse("2.1.0"), ">=", "2.0")
    True
    """
    from packaging.version import parse  # where versions are compared, not at every start

    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigurationError(
            f"Versions cannot be compared so; got operation {operation!r}. Use one of {list(STR_OPERATION_TO_FUNC)}."
        )
    version = installed_version(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return bool(STR_OPERATION_TO_FUNC[operation](version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch with another; torch is not imported for it.

    Args:
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        version: What to compare with, such as `"2.1"`.

    Raises:
        ConfigurationError: The operation is none of these.
    """
    return compare_versions("torch", operation, version)


@cache
def installed_version(distribution: str) -> Version:
    """Return the version of an installed distribution.

    Raises:
        importlib.metadata.PackageNotFoundError: It is not installed.
    """
    from packaging.version import parse

    return parse(importlib.metadata.version(distribution))
