"""Runs of the elements of a tensor."""

from __future__ import annotations

import itertools

import pytest
import torch

from accel_core.mesh.flat import FlatPart, boxes
from accel_core.mesh.tensor import empty_like, fill, is_spread, local_part, local_parts, placed_like, spread_alike


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2), (1, 4), (4, 1, 2)])
def test_boxes_are_the_run_in_its_order(shape: tuple[int, ...]) -> None:
    """The boxes of every run of every shape hold its elements, one after the other."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start, stop in itertools.combinations(range(whole.numel() + 1), 2):
        found = []
        for offsets, sizes in boxes(shape, start, stop):
            part = whole
            for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dimension, offset, size)
            found += part.flatten().tolist()
        assert found == list(range(start, stop))
    assert list(boxes(shape, 0, 0)) == []


def test_a_part_is_filled_from_the_whole_and_keeps_its_memory() -> None:
    """Each rank's part of a whole tensor gets its elements, in memory of its own or in that it has."""
    whole = torch.arange(12.0).reshape(4, 3)
    memory = torch.zeros(5)
    part = FlatPart(memory, (4, 3), (2, 5, 5), 1)
    assert is_spread(part)
    assert part.shape == (4, 3)
    assert part.dtype == torch.float32
    assert local_part(part).numel() == 5
    fill(part, whole)
    assert memory.tolist() == [2, 3, 4, 5, 6]
    assert [(box, values.tolist()) for box, values in local_parts(part)] == [
        (((0, 2), (1, 1)), [[2.0]]),
        (((1, 0), (1, 3)), [[3.0, 4.0, 5.0]]),
        (((2, 0), (1, 1)), [[6.0]]),
    ]
    placed = placed_like(whole, part)
    assert isinstance(placed, FlatPart)
    assert placed.run.tolist() == memory.tolist()
    assert spread_alike(placed, part)
    placed.run.zero_()
    assert whole.flatten()[2:7].tolist() == [2, 3, 4, 5, 6]
    other = empty_like(part, torch.int64)
    assert (other.dtype, other.shape, local_part(other).shape) == (torch.int64, (4, 3), (5,))
    assert not spread_alike(part, FlatPart(memory, (4, 3), (5, 5, 2), 1))
    assert not spread_alike(part, whole)


def test_a_part_cannot_be_computed_with() -> None:
    """An operation on a part is refused: its result would be that of a part of the elements."""
    with pytest.raises(NotImplementedError, match="cannot be computed with; got aten"):
        FlatPart(torch.zeros(2), (2, 2), (2, 2), 0) + 1
