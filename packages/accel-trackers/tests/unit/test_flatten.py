"""Tests of the lossless flattening."""

import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import types
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_trackers import codec
from accel_trackers.flatten import as_scalar, flatten, split


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


def _same(a, b):
    """Compare exactly: types, nan, tensors, containers."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and codec.dumps(a) == codec.dumps(b)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(_same, a.values(), b.values()))
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, codec.Described):
        return (a.type, a.kind) == (b.type, b.kind) and _same(a.content, b.content)
    return a == b and (isinstance(a, (set, frozenset)) or repr(a) == repr(b))


def _expected(value):
    """Return what a value comes back as: itself, except for classes that reading does not import."""
    if isinstance(value, Color):
        return codec.Described(codec.type_name(value), "enum", (value.name, value.value))
    if isinstance(value, Optim):
        fields = {"lr": _expected(value.lr), "betas": _expected(value.betas)}
        return codec.Described(codec.type_name(value), "dataclass", fields)
    if type(value) is dict:
        return {key: _expected(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_expected, value))
    return value


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


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(configs)
def test_restore_gives_the_nesting_back(config):
    """Whatever is flattened is restored exactly, through JSON."""
    flat = flatten(config)
    again = type(flat)(*codec.loads(codec.dumps([flat.values, flat.kinds])))
    assert _same(again.restore(), _expected(config))


@settings(max_examples=100, deadline=None)
@given(configs)
def test_table_has_one_plain_row_per_leaf(config):
    """Every leaf has its own row, of a type and a text that every tracker can store."""
    flat = flatten(config)
    assert len(flat.values) == _leaf_count(config)
    for path, value in flat.values.items():
        assert type(value) in (bool, int, float, str)
        path.encode()
        str(value).encode()
        assert not isinstance(value, int) or -(2**63) <= value < 2**63


@settings(max_examples=100, deadline=None)
@given(st.lists(keys, min_size=1, max_size=4))
def test_path_is_split_into_its_keys(path):
    """The dotted path of a leaf names every key on the way, whatever the keys hold."""
    nested = 1
    for key in reversed(path):
        nested = {key: nested}
    (written,) = flatten(nested).values
    assert list(map(repr, split(written))) == list(map(repr, path))


def test_tensors_without_values_are_read_on_the_cpu():
    """What was recorded is read there whatever the default device is."""
    written = codec.dumps({"none": torch.empty(0, 3), "some": torch.ones(2)})
    with torch.device("meta"):
        found = codec.loads(written)
    assert {name: (value.device.type, value.shape) for name, value in found.items()} == {
        "none": ("cpu", (0, 3)),
        "some": ("cpu", (2,)),
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(configs)
def test_codec_round_trip(config):
    """The notation of spool files holds every value exactly."""
    assert _same(codec.loads(codec.dumps(config)), _expected(config))


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
    assert flat.values["good"] == 1
    assert any(path.startswith("odd") for path in flat.values)
    assert flat.restore()["good"] == 1
    codec.loads(codec.dumps(odd))


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
    ).values
    assert values["path"] == "/data/x"
    assert values["dtype"] == "torch.bfloat16"
    assert values["color"] == "Color.RED"
    assert values["one"] == 3.0
    assert values["many"] == "[1, 2]"
    assert values["none"] == "None"
    assert values["empty"] == "[]"
    assert values["when"] == "2026-01-02"
