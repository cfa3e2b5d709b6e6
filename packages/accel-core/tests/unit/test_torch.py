"""Private names of torch."""

import importlib

import pytest

from accel_core import _torch


@pytest.mark.parametrize("name", _torch.PRIVATE_NAMES, ids=lambda name: name.path)
def test_torch_has_the_private_name(name):
    """The installed torch has each private name that is used, and each has a reason."""
    module, _, attribute = name.path.partition(":")
    owner, _, last = attribute.rpartition(".")
    home = importlib.import_module(module)
    holder = getattr(home, owner) if owner else home
    assert hasattr(holder(device="cpu") if owner == "GradScaler" else holder, last)
    assert name.reason.endswith(".")
