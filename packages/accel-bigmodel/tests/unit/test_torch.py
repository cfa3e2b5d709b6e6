import importlib

import pytest

from accel_bigmodel import _torch
from accel_core.host.versions import is_torch_version


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
    assert hasattr(holder, last)
    assert reason.endswith(".")
