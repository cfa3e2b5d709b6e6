"""Models and their state, as Accelerate asks of them."""

import sys

import pytest
import torch
from torch import nn

from accelerate._models import clean_state_dict_for_safetensors, get_module_children_bottom_up, is_peft_model


class Block(nn.Module):
    """A block with submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_children_come_before_their_parents() -> None:
    """Every module is listed after all its children, and the model last under the empty name."""
    names = [name for name, _ in get_module_children_bottom_up(Block(), return_fqns=True)]
    assert names == ["inner.0", "inner.1", "inner", ""]


def test_a_module_under_two_names_is_listed_twice() -> None:
    """A shared module appears under each of its names."""
    layer = nn.Linear(2, 2)
    assert get_module_children_bottom_up(nn.Sequential(layer, layer))[:2] == [layer, layer]


def test_state_for_safetensors() -> None:
    """Of two names of one memory the first is kept, and views become tensors of their own."""
    base = torch.arange(6.0).reshape(2, 3)
    state = clean_state_dict_for_safetensors({"a": base, "b": base, "part": base[1], "turned": base.clone().t()})
    assert list(state) == ["a", "part", "turned"]
    assert state["part"].equal(base[1])
    assert state["part"].untyped_storage().nbytes() == 3 * base.element_size()
    assert state["turned"].is_contiguous()


def test_no_model_is_of_a_library_that_was_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking does not import peft."""
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert not is_peft_model(nn.Linear(1, 1))
    assert "peft" not in sys.modules
