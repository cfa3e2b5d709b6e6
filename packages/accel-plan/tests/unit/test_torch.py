import importlib

import pytest
import torch

from accel_core.host.versions import is_torch_version
from accel_plan import _torch


@pytest.mark.parametrize(("path", "reason"), _torch.PRIVATE_NAMES.items())
def test_torch_has_the_private_name(path, reason):
    """The installed torch has each private name that is used, and each has a reason."""
    first, end = _torch.ONLY_IN.get(path, ("2.0", "99"))
    if is_torch_version("<", first) or is_torch_version(">=", end):
        pytest.skip("this torch does not need it")
    module, _, attribute = path.partition(":")
    owner, _, last = attribute.rpartition(".")
    home = importlib.import_module(module)
    holder = getattr(home, owner) if owner else home
    # Storages have it, their class has not.
    assert hasattr(torch.UntypedStorage(0) if owner == "UntypedStorage" else holder, last)
    assert reason.endswith(".")
