"""Batches that are looked up in an order that is there are those of batches that are all made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from accel_core.data import samplers
from accel_core.data.samplers import BatchSamplerShard, SeedableRandomSampler, batches_from
from accel_core.data.shard import StepCounts, shard_batches


def with_generator(size: int) -> Sampler[int]:
    """Return a random order of a generator of its own."""
    return RandomSampler(range(size), generator=torch.Generator().manual_seed(5))


def with_default(size: int) -> Sampler[int]:
    """Return a random order that draws its seed from torch's generator."""
    torch.manual_seed(5)
    return RandomSampler(range(size))


def with_seed(size: int) -> Sampler[int]:
    """Return an order that depends on a seed and the epoch."""
    return SeedableRandomSampler(range(size), data_seed=5)


def with_replacement(size: int) -> Sampler[int]:
    """Return random places of a generator of its own, some of them several times."""
    return RandomSampler(range(size), replacement=True, generator=torch.Generator().manual_seed(5))


def in_order(size: int) -> Sampler[int]:
    """Return the order of the data."""
    return SequentialSampler(range(size))


def all_made(shard: BatchSamplerShard, offset: int, counts: dict[int, StepCounts]) -> Iterator[list[int]]:
    """Return what a rank gets where the batches of all ranks are made."""
    batches, pool = shard.batch_sampler, list[int]()
    if offset:
        batches, pool = batches_from(shard.batch_sampler, offset, shard.spec.step_samples or 0)
    return shard_batches(batches, shard.spec, pool=pool, note=counts.__setitem__)


def seen(shard: BatchSamplerShard, offset: int, start: Callable[..., Iterator[list[int]]]) -> list[object]:
    """Return the batches of two epochs, and after each what was counted and drawn."""
    sampler = shard.batch_sampler.sampler
    found: list[object] = []
    for begin in (offset, 0):
        counts: dict[int, StepCounts] = {}
        for batch in itertools.chain(start(shard, begin, counts), [None]):
            own = getattr(sampler, "generator", None)
            states = [each.get_state() for each in (own, torch.default_generator) if each is not None]
            found.append((batch, dict(counts), *(bytes(each.tolist()) for each in states)))
    return [found, getattr(sampler, "epoch", 0)]


@pytest.mark.parametrize("make", [in_order, with_generator, with_default, with_seed, with_replacement])
@pytest.mark.parametrize("split", [False, True])
def test_batches_counts_and_draws_are_those_of_all_ranks_batches(
    make: Callable[[int], Sampler[int]], split: bool
) -> None:
    """At any position, for any end of the data, with generators where they would be after each batch."""
    grid = itertools.product((1, 7, 12, 24), (1, 4, 6), (False, True), (1, 2, 3), (False, True), (0, 1, 7))
    for size, batch, drop_last, ranks, even, offset in grid:
        if offset > size or (split and batch % ranks):
            continue
        for rank in {0, ranks - 1}:
            made, found = (
                seen(
                    BatchSamplerShard(BatchSampler(make(size), batch, drop_last), ranks, rank, split, even), offset, way
                )
                for way in (all_made, BatchSamplerShard.from_offset)
            )
            assert found == made, (size, batch, drop_last, ranks, even, offset, rank)


def test_no_index_of_another_rank_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred thousand ranks, one makes its own batches alone."""

    class Watched(list[int]):
        """An order that knows what was asked of it."""

        asked = 0

        def __getitem__(self, place: object) -> object:
            """Count, and return a part."""
            part = super().__getitem__(place)  # type: ignore[call-overload]
            self.asked += len(part)
            return part

    ranks, steps = 100_000, 3
    shard = BatchSamplerShard(BatchSampler(in_order(ranks * 4 * steps), 4, False), ranks, 17)
    order = Watched(range(ranks * 4 * steps))
    monkeypatch.setattr(samplers, "_drawn", lambda sampler: (order, iter(())))
    batches = shard.from_offset(0, {})
    taken = [*itertools.islice(batches, steps)]
    assert taken == [[*range(start, start + 4)] for start in range(17 * 4, ranks * 4 * steps, ranks * 4)]
    assert order.asked == 4 * steps
