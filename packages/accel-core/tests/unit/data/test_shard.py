"""The arithmetic of sharing data, tried exhaustively without processes."""

import itertools

import pytest

from accel_core.data.shard import (
    ShardSpec,
    StepCounts,
    count_steps,
    shard_batches,
    shard_stream,
    skip_samples,
)
from accel_core.mesh.layout import Layout

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
    """Without repeats, the steps of all ranks are the dataset in order; with drop_last, its full global batches."""
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


@pytest.mark.parametrize("split", [False, True])
def test_even_ranks_hold_equally_many(split):
    """With even_batches every rank gets the same number of batches, all of the full size."""
    for size, parted in cuts(split):
        part = size // len(parted) if split else size
        for length in LENGTHS:
            dealt = [list(shard_batches(batches_of(length, size), cut)) for cut in parted]
            assert len({len(batches) for batches in dealt}) == 1
            assert {len(batch) for batches in dealt for batch in batches} == {part}


def test_fill_comes_from_the_start():
    """What is missing at the end is the data from its start, again and again if need be."""
    dealt = [list(shard_batches(batches_of(9, 2), ShardSpec(4, rank, 2))) for rank in range(4)]
    assert [batches[-1] for batches in dealt] == [[8, 0], [1, 2], [3, 4], [5, 6]]
    assert [list(shard_batches([[0]], ShardSpec(3, rank, 2))) for rank in range(3)] == [[[0, 0]]] * 3


@pytest.mark.parametrize("split", [False, True])
def test_skipping_leaves_the_rest_unchanged(split):
    """Beginning at any step gives exactly what an uninterrupted rank gets from there on, repeats included."""
    for size, parted in cuts(split):
        for length in (1, 7, 12, 23):
            for cut in parted:
                whole = list(shard_batches(batches_of(length, size), cut))
                for step in range(len(whole) + 1):
                    offset = min(step * cut.step_samples, length)
                    rest, pool = skip_samples(iter(batches_of(length, size)), offset, cut.step_samples)
                    assert list(shard_batches(rest, cut, pool=pool)) == whole[step:]


@pytest.mark.parametrize("before", RANKS)
@pytest.mark.parametrize("after", RANKS)
def test_another_number_of_ranks_goes_on(before, after):
    """Stopped on some ranks at any step and continued on others, every sample is seen exactly once."""
    for size, length in itertools.product(BATCHES, (1, 13, 40)):
        for step in range(count_steps(-(-length // size), ShardSpec(before, 0, size)) + 1):
            offset = min(step * before * size, length)
            tallies = {}
            parts = []
            for rank in range(after):
                cut = ShardSpec(after, rank, size)
                rest, pool = skip_samples(iter(batches_of(length, size)), offset, cut.step_samples)
                parts.append(list(shard_batches(rest, cut, pool=pool, note=tallies.__setitem__)))
            rest = [s for k in range(len(parts[0])) for s in real_samples(parts, tallies, k)]
            assert rest == list(range(offset, length))


def test_skip_inside_a_batch():
    """An offset that falls inside a batch drops that batch's first part alone."""
    rest, pool = skip_samples(iter([[0, 1, 2], [3, 4, 5], [6]]), 4, 10)
    assert (list(rest), pool) == ([[4, 5], [6]], [0, 1, 2, 3])
    rest, pool = skip_samples(iter([[0]]), 9, 2)
    assert (list(rest), pool) == ([], [0])


def test_batches_without_a_fixed_size():
    """Batches of any sizes go round the ranks; at the end whole batches are repeated, or ranks get none."""
    batches = [[0, 1, 2], [3], [4, 5]]
    even = [list(shard_batches(batches, ShardSpec(2, rank))) for rank in range(2)]
    assert even == [[[0, 1, 2], [4, 5]], [[3], [0, 1, 2]]]
    tallies = {}
    uneven = [
        list(shard_batches(batches, ShardSpec(2, rank, even=False), note=tallies.__setitem__)) for rank in range(2)
    ]
    assert uneven == [[[0, 1, 2], [4, 5]], [[3]]]
    assert tallies == {0: StepCounts((3, 1), (3, 1)), 1: StepCounts((2, 0), (2, 0))}
    assert tallies[1].readers == (0,)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_streams(split, drop_last):
    """A stream that all ranks read is shared out as a map-style dataset is."""
    for size, parted in cuts(split, drop_last=drop_last):
        for length in LENGTHS:
            dealt = [list(shard_stream(range(length), cut)) for cut in parted]
            mapped = [list(shard_batches(batches_of(length, size, drop_last), cut)) for cut in parted]
            assert [[part for part, _ in steps] for steps in dealt] == mapped
            seen = []
            for step in zip(*dealt, strict=True):
                tally = step[0][1]
                assert all(other == tally for _, other in step)
                for rank, (part, _) in enumerate(step):
                    seen += part if tally is None else part[: tally.real[rank]]
            whole = parted[0].step_samples
            assert seen == list(range(length // whole * whole if drop_last else length))


@pytest.mark.parametrize(
    "sizes",
    [{"dp_replicate": 4, "dp_shard": 32, "tp": 8}, {"dp_shard": 64, "cp": 4, "tp": 4}],
    ids=str,
)
@pytest.mark.parametrize("even", [True, False])
def test_a_thousand_ranks_read_every_sample_once(sizes, even):
    """On 1,024 ranks, ranks of a replica read the same batch, and the first of each counts every sample once."""
    layouts = [Layout.of(rank, 1024, sizes) for rank in (0, 1, 511, 1023)]
    parts, replicas = layouts[0].parts, layouts[0].replicas
    assert all(layout.parts == parts and layout.part == parts[layout.rank] for layout in layouts)
    for length in (5, replicas + 3):
        counts = {}
        batches = batches_of(length, 2)
        dealt = [
            list(shard_batches(batches, ShardSpec(replicas, part, 2, even=even), note=counts.__setitem__))
            for part in range(replicas)
        ]
        seen = []
        for step in range(max(map(len, dealt))):
            held = [dealt[part][step] if step < len(dealt[part]) else [] for part in parts]
            known = counts.get(step, StepCounts((2,) * replicas, (2,) * replicas)).over(parts)
            assert tuple(map(len, held)) == known.rows
            readers = [rank for rank, real in enumerate(known.real) if real]
            assert len({parts[rank] for rank in readers}) == len(readers)
            seen += [sample for batch, real in zip(held, known.real, strict=True) for sample in batch[:real]]
        assert seen == list(range(length))
