"""The arithmetic of sharing data, tried exhaustively without processes."""

import itertools

import pytest

from accel_core.data.shard import (
    ShardSpec,
    count_steps,
    shard_batches,
)

LENGTHS, BATCHES, RANKS = range(1, 41), range(1, 8), range(1, 5)


def batches_of(length, size, drop_last=False, start=0):
    """Cut the indices `start..length-1` as torch's BatchSampler does."""
    found = [list(range(first, min(first + size, length))) for first in range(start, length, size)]
    return [batch for batch in found if len(batch) == size] if drop_last else found


def real_samples(parts, tallies, step):
    """Lay what ranks hold in a step side by side, without repeats."""
    tally = tallies.get(step)
    if tally is None:
        return [sample for part in parts for sample in part[step]]
    held = [part[step] if step < len(part) else [] for part in parts]
    assert tuple(map(len, held)) == tally.rows
    return [sample for rows, real in zip(held, tally.real, strict=True) for sample in rows[:real]]


def cuts(split, **kwargs):
    """All combinations of batch size and ranks that can be cut so."""
    for size, ranks in itertools.product(BATCHES, RANKS):
        if not split or size % ranks == 0:
            yield size, [ShardSpec(ranks, rank, size, split, **kwargs) for rank in range(ranks)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_every_sample_once_in_order(split, even, drop_last):
    """Without repeats, the steps of all ranks are the dataset in order; with drop_last, its full global batches.

    With even_batches every rank gets the same number of batches, all of the full size.
    """
    for size, parted in cuts(split, even=even, drop_last=drop_last):
        for length in LENGTHS:
            tallies = {}
            batches = batches_of(length, size, drop_last)
            parts = [list(shard_batches(batches, cut, note=tallies.__setitem__)) for cut in parted]
            steps = max(map(len, parts))
            seen = [sample for step in range(steps) for sample in real_samples(parts, tallies, step)]
            whole = parted[0].step_samples
            assert seen == list(range(length // whole * whole if drop_last else length)), (length, size, len(parted))
            assert [len(part) for part in parts] == [count_steps(len(batches), cut, samples=length) for cut in parted]
            if even:
                assert len({len(part) for part in parts}) == 1
                assert {len(batch) for part in parts for batch in part} <= {size // len(parted) if split else size}


def test_fill_comes_from_the_start():
    """What is missing at the end is the data from its start, again and again if need be."""
    dealt = [list(shard_batches(batches_of(9, 2), ShardSpec(4, rank, 2))) for rank in range(4)]
    assert [batches[-1] for batches in dealt] == [[8, 0], [1, 2], [3, 4], [5, 6]]
    assert [list(shard_batches([[0]], ShardSpec(3, rank, 2))) for rank in range(3)] == [[[0, 0]]] * 3
