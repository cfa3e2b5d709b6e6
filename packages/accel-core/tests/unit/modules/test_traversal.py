"""Walks over modules and tensors."""

import pytest
import torch
from torch import nn

from accel_core.modules.traversal import (
    get_non_persistent_buffers,
    has_repeated_blocks,
    named_module_tensors,
    owner_of,
)


class Block(nn.Module):
    """A block with a bare parameter, buffers of both kinds and submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.register_buffer("kept", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["scale", "kept", "scratch"]),
        ({"include_buffers": False}, ["scale"]),
        ({"remove_non_persistent": True}, ["scale", "kept"]),
        ({"recurse": True}, ["scale", "inner.0.weight", "inner.0.bias", "kept", "scratch"]),
    ],
)
def test_named_module_tensors_chooses_tensors(options: dict[str, bool], expected: list[str]) -> None:
    """Parameters come before buffers; each option leaves out what it names."""
    assert [name for name, _ in named_module_tensors(Block(), **options)] == expected


def test_non_persistent_buffers_are_named_from_the_root() -> None:
    """With `fqns`, a buffer of a submodule carries its path."""
    model = nn.Sequential(Block())
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"scratch"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.scratch"}


def test_repeated_blocks_are_several_of_one_class() -> None:
    """A list of two equal classes counts, one of mixed classes does not."""
    assert has_repeated_blocks(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])}))
    assert not has_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]))


def test_owner_of_names_the_missing_submodule() -> None:
    """A path through a module that does not exist is refused with that module's name."""
    model = Block()
    assert owner_of(model, "inner.0.weight") == (model.inner[0], "weight")
    with pytest.raises(AttributeError, match="has no attribute `outer`"):
        owner_of(model, "outer.weight")
