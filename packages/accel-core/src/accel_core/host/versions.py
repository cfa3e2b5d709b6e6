"""Versions of libraries, compared without importing them."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from accel_core._records import record
from accel_core.errors import TorchVersionError, expect_one_of

if TYPE_CHECKING:
    from packaging.version import Version

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
"""The function of each sign of comparison."""


@record(frozen=True)
class TorchFeature:
    """Something that accel does with the torch that has it, and refuses with one that has not."""

    name: str  # what it is, as the beginning of a sentence
    since: str  # the first version of torch that has it
    instead: str  # what else may be done, as the end of a sentence


TORCH_FEATURES = {
    "context_ring": TorchFeature(
        "Context parallel by cp_comm_strategy='alltoall'", "2.13", "use cp_comm_strategy='allgather'"
    ),
    "fsdp2_with_tp": TorchFeature(
        "FSDP2 of a model that ranks split by tensor parallel", "2.10", "use one of the two alone"
    ),
    "pipeline_of_sequential": TorchFeature(
        "A pipeline of a model with an nn.Sequential", "2.10", "give the model attributes in place of it"
    ),
    "pipelines": TorchFeature("Training in a pipeline of ranks", "2.13", "use FSDP, or Megatron-LM for its own models"),
    "training_plan": TorchFeature("`accel plan --train` for several ranks", "2.13", "plan the layout 'single'"),
}
"""What not every torch from 2.8 on has, each asked for where it is needed; docs/installation.md shows them."""


def require_torch(feature: str) -> None:
    """Refuse what the installed torch lacks."""
    needed = TORCH_FEATURES[feature]
    if is_torch_version("<", needed.since):
        raise TorchVersionError(
            f"{needed.name} needs a later torch; got torch {installed_version('torch')}. "
            f"Install torch {needed.since} or later, or {needed.instead}."
        )


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of a library, or a version, with another.

    Raises:
        ConfigurationError: The operation is none of these.
        importlib.metadata.PackageNotFoundError: The library is not installed.

    >>> from packaging.version import parse
    >>> compare_versions(parse("2.1.0"), ">=", "2.0")
    True
    """
    from packaging.version import parse  # where versions are compared, not at every start

    expect_one_of(STR_OPERATION_TO_FUNC, "operation", operation)
    version = installed_version(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return bool(STR_OPERATION_TO_FUNC[operation](version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch with another; torch is not imported for it.

    Args:
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        version: What to compare with, such as `"2.1"`.

    Returns:
        Whether the installed version stands in that relation to the other.

    Raises:
        ConfigurationError: The operation is none of these.

    Examples:
        >>> is_torch_version(">=", "2.0")
        True
    """
    return compare_versions("torch", operation, version)


@cache
def installed_version(distribution: str) -> Version:
    """Return the version of an installed distribution.

    Raises:
        importlib.metadata.PackageNotFoundError: It is not installed.
    """
    from packaging.version import parse

    return parse(importlib.import_module("importlib.metadata").version(distribution))
