"""Versions compared without importing libraries."""

import importlib.metadata

import pytest
from packaging.version import parse

from accel_core.errors import ConfigurationError, TorchVersionError
from accel_core.host import versions
from accel_core.host.versions import TorchFeature, compare_versions, is_torch_version, require_torch


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
    """A name stands for the version that is installed; no version, and a sign that is no comparison, are refused."""
    assert compare_versions("packaging", "==", importlib.metadata.version("packaging"))
    assert is_torch_version("==", importlib.metadata.version("torch"))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-distribution", ">", "1")
    with pytest.raises(ConfigurationError, match=r"got '=>'. Use one of \['>', '>=',"):
        compare_versions("torch", "=>", "1.0")


def test_a_feature_that_torch_lacks_is_refused_by_name(monkeypatch):
    """The error names the feature, the torch that is there and the one that has it; what torch has passes."""
    found = importlib.metadata.version("torch")
    rows = {"late": TorchFeature("Time travel", "99.1", "wait"), "early": TorchFeature("Tensors", "0.1", "think")}
    monkeypatch.setattr(versions, "TORCH_FEATURES", rows)
    require_torch("early")
    with pytest.raises(TorchVersionError) as caught:
        require_torch("late")
    assert str(caught.value) == (
        f"Time travel needs a later torch; got torch {found}. Install torch 99.1 or later, or wait."
    )
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ValueError)
