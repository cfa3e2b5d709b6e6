"""The rows of batches of any kind."""

from collections import OrderedDict, deque, namedtuple

import pytest
import torch

from accel_core.data.rows import count_rows, count_rows_like, is_nest, join_rows, outline, take_rows

Pair = namedtuple("Pair", "left right")
BATCHES = {
    "tensor": torch.arange(3),
    "mapping": {"a": torch.arange(3), "name": ["x", "y", "z"]},
    "ordered": OrderedDict(a=torch.arange(3)),
    "columns": [torch.arange(3), ["x", "y", "z"]],
    "named": Pair(torch.arange(3), torch.ones(3, 2)),
    "strings": ["x", "y", "z"],
    "objects": [{"a": 1}, {"a": 2}, {"a": 3}],
    "ragged": [torch.ones(1), torch.ones(2), torch.ones(5)],
    "tuple": ("x", "y", "z"),
    "with a scalar": {"a": torch.arange(3), "loss": torch.tensor(1.0), "note": "same"},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_count_take_and_join(kind):
    """Every kind of batch counts three rows; cut in two and joined, it is itself, of the same type."""
    batch = BATCHES[kind]
    assert count_rows(batch, 3) == 3
    first, rest = take_rows(batch, slice(0, 1), 3), take_rows(batch, slice(1, 3), 3)
    assert (count_rows(first, 1), count_rows(rest, 2)) == (1, 2)
    joined = join_rows([first, rest], [1, 2])
    assert type(joined) is type(batch)
    if kind != "with a scalar":
        assert str(joined) == str(batch)
    else:
        assert torch.equal(joined["a"], batch["a"])
        assert joined["note"] == "same"


class Table:
    """Compares place by place, as tables of pandas do."""

    __hash__ = None

    def __eq__(self, other):
        return self if self is other else Table()

    def __bool__(self):
        raise ValueError("the truth value of a table is ambiguous")


def test_arrays_count_rows_as_tensors_do():
    """The first dim of numpy arrays counts samples, alone and as columns; values that do not compare stay apart."""
    np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    columns = [np.arange(6).reshape(3, 2), np.array(["x", "y", "z"])]
    assert (count_rows(columns), count_rows(columns, 3), count_rows(np.array(1.0))) == (3, 3, None)
    assert count_rows_like([column[:2] for column in columns], outline(columns), 3) == 2
    parts = [take_rows(columns, slice(0, 1), 3), take_rows(columns, slice(1, 3), 3)]
    joined = join_rows(parts, [1, 2])
    assert [type(column) for column in joined] == [np.ndarray, np.ndarray]
    assert [column.tolist() for column in joined] == [column.tolist() for column in columns]
    assert [row.shape for row in join_rows([np.ones((1, 3)), np.ones((1, 4))], [1, 1])] == [(3,), (4,)]
    joined = join_rows([np.ones(2), np.ma.masked_equal([3.0, 0.0], 0.0)], [2, 2])
    assert joined.tolist() == [1.0, 1.0, 3.0, None]
    tables = [{"name": Table()}, {"name": Table()}]
    assert join_rows(tables, [None, None]) == {"name": [tables[0]["name"], tables[1]["name"]]}


def test_ragged_tensors_become_a_list():
    """Tensors that differ beyond the first dim come back row by row; parts without rows add nothing."""
    joined = join_rows([torch.ones(2, 3), torch.ones(1, 4), torch.ones(0, 9)], [2, 1, 0])
    assert [tuple(row.shape) for row in joined] == [(3,), (3,), (4,)]
    assert join_rows([torch.ones(2, 3), torch.ones(0, 4)], [2, 0]).shape == (2, 3)


def test_objects_that_hold_tensors_are_one_a_batch():
    """Objects whose comparison is one of tensors come back one a batch, whatever their class."""
    first, second = deque([torch.arange(3)]), deque([torch.ones(3)])
    assert join_rows([first, second], [3, 3]) == [first, second]


def test_a_list_in_two_ways():
    """The number of rows decides whether a list holds columns or samples."""
    two = [torch.ones(2), torch.ones(2)]
    assert is_nest(two, 2)
    assert not is_nest([torch.ones(5), torch.ones(5)], 2)
    assert not is_nest(["a", "b"], 2)
    assert count_rows("text") is None
    assert count_rows(torch.tensor(1.0)) is None


def test_a_short_list_is_read_as_a_full_one():
    """Columns and samples of a batch that is not full are told apart by the first batch, at any depth."""
    columns, samples = [torch.ones(4, 2), torch.ones(4)], [torch.ones(5)] * 4
    short_columns, short_samples = [torch.ones(3, 2), torch.ones(3)], [torch.ones(5)] * 3
    for wrap in (lambda batch: batch, lambda batch: {"inputs": batch}, lambda batch: Pair(batch, "note")):
        assert count_rows_like(wrap(short_columns), outline(wrap(columns)), 4) == 3
        assert count_rows_like(wrap(short_samples), outline(wrap(samples)), 4) == 3
    assert count_rows_like(short_columns, short_columns, 4) == 3
    assert count_rows_like(["a", "b"], ["a", "b"], 4) == 2
    assert count_rows_like(short_columns, columns, None) == 3
