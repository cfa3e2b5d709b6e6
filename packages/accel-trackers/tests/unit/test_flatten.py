"""Tests of flattening a configuration."""

import dataclasses
import datetime
import decimal
import enum
import pathlib
import types
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_trackers.flatten import as_scalar, flatten


class Color(enum.Enum):
    """An enumeration of a user."""

    RED = "red"
    BLUE = 2


@dataclasses.dataclass
class Optim:
    """A dataclass of a user."""

    lr: object
    betas: object = (0.9, 0.999)


class Angry:
    """An object that cannot be looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


tensors = st.builds(
    lambda values, dtype: torch.tensor(values, dtype=dtype),
    st.lists(st.integers(0, 100), max_size=30),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(st.characters(), max_size=4),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([*Color, torch.float16, torch.device("cpu"), torch.Size([2, 3]), range(1, 9, 2)]),
    st.builds(pathlib.PurePosixPath, st.text("abc/.", max_size=6)).map(pathlib.Path),
    st.builds(decimal.Decimal, st.integers()),
    st.datetimes() | st.dates() | st.timedeltas() | st.uuids(),
    st.sets(st.integers()) | st.frozensets(st.text(max_size=3)),
    tensors,
)
keys = st.one_of(
    st.text(max_size=5), st.text(".\\[]e$", max_size=4), st.integers(), st.booleans(), st.none(), st.tuples()
)
configs = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(Optim, inner, inner),
    ),
    max_leaves=12,
)


def _leaf_count(value):
    if isinstance(value, dict) and value:
        return sum(map(_leaf_count, value.values()))
    if type(value) in (list, tuple) and value:
        return sum(map(_leaf_count, value))
    if isinstance(value, Optim):
        return _leaf_count(value.lr) + _leaf_count(value.betas)
    return 1


@settings(max_examples=100, deadline=None)
@given(configs)
def test_table_has_one_plain_row_per_leaf(config):
    """Every leaf has its own row, of a type and a text that every tracker can store."""
    flat = flatten(config)
    assert len(flat) == _leaf_count(config)
    for path, value in flat.items():
        assert type(value) in (bool, int, float, str)
        path.encode()
        str(value).encode()
        assert not isinstance(value, int) or -(2**63) <= value < 2**63


def test_paths_that_are_written_alike_are_both_kept():
    """No leaf is lost where keys of several kinds have the same text."""
    assert flatten({1: "a", "1": "b", "x.y": 1, "x": {"y": 2}}) == {"1": "a", "1 (2)": "b", "x.y": 1, "x.y (2)": 2}


def _cycle():
    nest = []
    nest.append({"again": nest})
    return nest


def _deep():
    nest = 1
    for _ in range(300):
        nest = [nest]
    return nest


@pytest.mark.parametrize(
    "odd",
    [
        Angry(),
        _cycle(),
        _deep(),
        object(),
        print,
        Angry,
        types,
        torch.empty(3, device="meta"),
        torch.empty(2, 2).to_sparse(),
        torch.nn.Linear(1, 1),
        10**400,
        "\ud800",
        {Angry: Angry()},
        type("Broken", (dict,), {"items": lambda _self: 1 / 0})(a=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_raises(odd):
    """What cannot be taken apart is written as text and class."""
    flat = flatten({"odd": odd, "good": 1})
    assert flat["good"] == 1
    assert any(path.startswith("odd") for path in flat)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (torch.tensor(2), 2),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor([1.0, 2.0]), None),
        (True, True),
        ("text", "text"),
        (decimal.Decimal(1), None),
        (Color.RED, None),
        (None, None),
        (torch.empty((), device="meta"), None),
    ],
)
def test_scalars(value, number):
    """One number or text is found in whatever holds exactly one."""
    assert as_scalar(value) == number
    assert type(as_scalar(value)) is type(number)


def test_readable_values():
    """A table shows numbers as numbers and everything else in the words of its owner."""
    values = flatten(
        {
            "path": pathlib.Path("/data/x"),
            "dtype": torch.bfloat16,
            "color": Color.RED,
            "one": torch.tensor(3.0),
            "many": torch.tensor([1, 2]),
            "none": None,
            "empty": [],
            "when": datetime.date(2026, 1, 2),
            "id": uuid.UUID(int=1),
        }
    )
    assert values["path"] == "/data/x"
    assert values["dtype"] == "torch.bfloat16"
    assert values["color"] == "Color.RED"
    assert values["one"] == 3.0
    assert values["many"] == "[1, 2]"
    assert values["none"] == "None"
    assert values["empty"] == "[]"
    assert values["when"] == "2026-01-02"
