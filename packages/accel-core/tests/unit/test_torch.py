"""Private names of torch."""

import importlib

import pytest

from accel_core import _torch


@pytest.mark.parametrize("name", _torch.PRIVATE_NAMES, ids=lambda name: name.path)
def test_torch_has_the_private_name(name):
    """The installed torch has each private name that is used, and each has a reason."""
    module, _, attribute = name.path.partition(":")
    assert hasattr(importlib.import_module(module), attribute)
    assert name.reason.endswith(".")
