"""Private names of torch."""

import importlib
from pathlib import Path

import pytest

_PARAGRAPHS = (Path(__file__).parent / "private_names.txt").read_text().strip().split("\n\n")[1:]
_NAMES = dict(each.split("\n", 1) for each in _PARAGRAPHS)


def _is_there(path: str) -> bool:
    module, _, attribute = path.partition(":")
    owner, _, last = attribute.rpartition(".")
    home = importlib.import_module(module)
    holder = getattr(home, owner) if owner else home
    return hasattr(holder(device="cpu") if owner == "GradScaler" else holder, last)


@pytest.mark.parametrize("paths", _NAMES)
def test_torch_has_the_private_name(paths):
    """The installed torch has each private name that is used, or the later one, and each has a reason."""
    path, _, renamed = paths.partition(" now ")
    assert _is_there(path) or (renamed and _is_there(renamed))
    assert _NAMES[paths].endswith(".")
