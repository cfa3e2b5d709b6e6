import importlib

import pytest
import torch

from accel_bigmodel import _torch


@pytest.mark.parametrize(("path", "reason"), _torch.PRIVATE_NAMES.items())
def test_torch_has_the_private_name(path, reason):
    """The installed torch has each private name that is used, and each has a reason."""
    module, _, attribute = path.partition(":")
    owner, _, last = attribute.rpartition(".")
    home = importlib.import_module(module)
    holder = getattr(home, owner) if owner else home
    # Storages have it, their class has not.
    assert hasattr(torch.UntypedStorage(0) if owner == "UntypedStorage" else holder, last)
    assert reason.endswith(".")
