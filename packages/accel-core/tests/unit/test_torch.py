"""Private names of torch."""

import importlib

import pytest

from accel_core import _torch


def _is_there(path: str) -> bool:
    module, _, attribute = path.partition(":")
    owner, _, last = attribute.rpartition(".")
    home = importlib.import_module(module)
    holder = getattr(home, owner) if owner else home
    return hasattr(holder(device="cpu") if owner == "GradScaler" else holder, last)


@pytest.mark.parametrize("name", _torch.PRIVATE_NAMES, ids=lambda name: name.path)
def test_torch_has_the_private_name(name):
    """The installed torch has each private name that is used, or the later one, and each has a reason."""
    assert _is_there(name.path) or (name.renamed and _is_there(name.renamed))
    assert name.reason.endswith(".")
