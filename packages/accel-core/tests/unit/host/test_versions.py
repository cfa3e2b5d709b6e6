"""Versions compared without importing libraries."""

import importlib.metadata

import pytest
from packaging.version import parse

from accel_core.errors import ConfigurationError
from accel_core.host.versions import compare_versions, is_torch_version


@pytest.mark.parametrize(
    ("version", "operation", "other", "expected"),
    [
        ("2.1.0", ">=", "2.1", True),
        ("2.1.0", ">", "2.1", False),
        ("2.10", "<", "2.9", False),
        ("2.0", "!=", "2.0.0", False),
        ("2.0", "==", "2.0.0", True),
        ("2.0rc1", "<=", "2.0", True),
    ],
)
def test_versions_are_compared_as_versions(version, operation, other, expected):
    """Numbers count, not letters, and a release candidate comes before its release."""
    assert compare_versions(parse(version), operation, other) is expected


def test_installed_libraries_are_found_by_name():
    """A name stands for the version that is installed."""
    assert compare_versions("packaging", "==", importlib.metadata.version("packaging"))
    assert is_torch_version("==", importlib.metadata.version("torch"))


def test_unknown_operation():
    """A sign that is no comparison is refused with those that are."""
    with pytest.raises(ConfigurationError, match=r"got operation '=>'. Use one of \['>', '>=',"):
        compare_versions("torch", "=>", "1.0")


def test_missing_library():
    """A library that is not installed has no version."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-distribution", ">", "1")
