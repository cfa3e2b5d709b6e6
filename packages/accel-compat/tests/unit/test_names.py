"""Names of objects, and names that lead to values."""

from types import SimpleNamespace

import pytest
import torch

from accelerate._names import get_pretty_name, recursive_getattr


def test_pretty_names() -> None:
    """A class and a function have names, an object has its class's, a module its kind's."""
    assert [get_pretty_name(item) for item in (len, int, 3, torch.nn.Linear(1, 1))] == ["len", "int", "int", "Linear"]


def test_dotted_name_leads_to_its_value() -> None:
    """Each part is an attribute of the one before; a missing one is named."""
    tree = SimpleNamespace(a=SimpleNamespace(b=4))
    assert recursive_getattr(tree, "a.b") == 4
    with pytest.raises(AttributeError, match="'c'"):
        recursive_getattr(tree, "a.c")
