"""Nests taken apart and put together."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch

from accel_core.comm.tree import (
    honor_type,
    is_namedtuple,
    leaf_paths,
    recursively_apply,
    tree_leaves,
    tree_map,
)
from accel_core.errors import UnsupportedTypeError

Pair = namedtuple("Pair", "left right")


class Batch(UserDict):
    """A mapping with an attribute beside its items."""

    def __init__(self, data=None, note=None):
        super().__init__(data or {})
        self.note = note


class Output(OrderedDict):
    """A mapping whose items are attributes too, as models return it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Rows(list):
    """A list of another class."""


def example():
    """Return a nest of every container."""
    one = torch.ones(1)
    return {
        "list": [one, (one, Pair(one, one))],
        "rows": Rows([one]),
        "ordered": OrderedDict(b=one, a=one),
        "default": defaultdict(list, k=one),
        "batch": Batch({"x": one}, note="kept"),
        "output": Output(logits=one),
        "proxy": MappingProxyType({"x": one}),
        7: [],
    }


def test_containers_keep_their_types_and_what_they_carry():
    """Every container comes back as its own class, with its attributes, and the original is left alone."""
    nest = example()
    doubled = recursively_apply(lambda tensor: tensor * 2, nest)
    for (path, before), (same_path, after) in zip(leaf_paths(nest), leaf_paths(doubled), strict=True):
        assert path == same_path
        assert before.item() == 1
        assert after.item() == 2
    for key in nest:
        assert type(doubled[key]) is type(nest[key])
    assert doubled["batch"].note == "kept"
    assert doubled["default"].default_factory is list
    assert doubled["output"].logits.item() == 2
    assert isinstance(doubled["list"][1][1], Pair)


def test_other_leaves_stay_or_are_refused():
    """Leaves that are no tensors stay the same objects, or are refused by name."""
    nest = {"a": 3, "b": (None, "x", {1, 2})}
    assert recursively_apply(torch.neg, nest) == nest
    with pytest.raises(UnsupportedTypeError, match=r"for `neg` may hold only what `is_torch_tensor` accepts.*'int'"):
        recursively_apply(torch.neg, nest, error_on_other_type=True)


def test_arguments_and_another_test():
    """Positional and keyword arguments reach the function, and the test says what it is applied to."""
    result = recursively_apply(
        lambda number, added, *, times=1: (number + added) * times,
        {"a": 3, "b": "x"},
        10,
        test_type=lambda leaf: isinstance(leaf, int),
        times=2,
    )
    assert result == {"a": 26, "b": "x"}


def test_several_nests_side_by_side():
    """Leaves at one place of several nests are given together; sequences of unequal lengths are refused."""
    first, second = example(), recursively_apply(lambda tensor: tensor + 1, example())
    added = tree_map(torch.add, first, second)
    assert [type(part) for part in added.values()] == [type(part) for part in first.values()]
    assert {leaf.item() for leaf in tree_leaves(added)} == {3}
    with pytest.raises(ValueError, match="shorter"):
        tree_map(torch.add, [1, 2], [1])


def test_named_tuples():
    """A named tuple is one by its fields, and is made again from items."""
    assert is_namedtuple(Pair(1, 2))
    assert not is_namedtuple((1, 2))
    assert not is_namedtuple([1])
    assert honor_type(Pair(1, 2), (number * 2 for number in (1, 2))) == Pair(2, 4)
    assert type(honor_type(Rows(), iter([1]))) is Rows
