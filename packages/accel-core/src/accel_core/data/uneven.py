"""Streams that end together: ranks agree, before every batch, on who has another one.

Each rank reads one batch ahead and tells the others, in one collective of a few bytes, how many rows it holds. So no
rank waits for one that has run out, and everybody knows which batch is the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from accel_core.comm.control import Channel
from accel_core.comm.disagreement import ranks_text
from accel_core.comm.objects import broadcast_object_list
from accel_core.data.base import EpochState, LoaderBase
from accel_core.data.rows import count_rows, count_rows_like, outline, take_rows
from accel_core.data.samplers import CountedBatch, get_sampler
from accel_core.data.shard import StepCounts
from accel_core.errors import RemoteRankError
from accel_core.logging import get_logger
from accel_core.process.world import ensure

_logger = get_logger(__name__)
_END: object = object()
_ENDED, _FAILED, _UNCOUNTED = -1, -2, -3


def synchronized_batches(loader: LoaderBase, epoch: EpochState, stream: Iterator[Any]) -> Iterator[Any]:
    """Yield batches until the streams of all ranks have ended, as the loader's `uneven_end` says.

    Raises:
        RemoteRankError: Reading failed on another rank.
    """
    ends = _Ends(loader, stream)
    full = loader.step_units(None)
    batch, held = ends.next()
    while held is not None:
        # Taken before the next batch is read: a state from after that would leave that batch out.
        state = loader.own_state()
        following, following_held = ends.next()
        last = following_held is None
        epoch.state = loader.own_state() if last else state
        counts = ends.counts(batch, held, last=last)
        loader._serve(epoch, counts, full if counts is None else ends.units(counts, batch), last=last)
        if last:
            real = -1 if min(held) < 0 else sum(held[rank] for rank in ends.readers)  # those of each part once
            loader.remainder = real if counts is None else counts.total
        yield batch.batch if type(batch) is CountedBatch else batch
        batch, held = following, following_held


class _Ends:
    """What ranks tell each other about the batches that they read."""

    def __init__(self, loader: LoaderBase, stream: Iterator[Any]) -> None:
        self.loader = loader
        self.stream = stream
        self.world = ensure()
        self.like: object = None
        parts = loader.parts
        self.readers = [parts.index(part) for part in range(max(parts) + 1)]
        self.first: object = _END
        self.spare: object = _END
        self.repeated = (0,) * self.world.size  # rows of the batch that each rank repeats
        # Agreeing must not wait for a device that is still computing: where operations go through one, these numbers
        # have a group of their own on the host.
        group_name = "" if self.world.device.type == "cpu" else "data"
        # Patient: reading a batch may take one rank much longer than another.
        self.channel = Channel(self.world, "reading the next batch", group_name=group_name)

    def next(self) -> tuple[Any, tuple[int, ...] | None]:
        """Read a batch and tell the others."""
        loader, world = self.loader, self.world
        failure: Exception | None = None
        batch: object = _END
        try:
            batch = next(self.stream, _END)
            mine = _ENDED if batch is _END else self._rows(batch)
        except Exception as error:
            failure, mine = error, _FAILED
        held = tuple(self.channel.exchange(mine))
        if failure is not None:
            raise failure
        if _FAILED in held:
            failed = [rank for rank, count in enumerate(held) if count == _FAILED]
            raise RemoteRankError(
                f"Rank {world.rank} gives up the next batch; got a failure of {ranks_text(failed)} to read its own. "
                "Fix the error that it reported; the traceback is in that rank's output."
            )
        ended = [rank for rank, count in enumerate(held) if count == _ENDED]
        if len(ended) == world.size:
            return _END, None
        if not ended:
            if loader.uneven_end != "drop" and self.first is _END:
                self.first, self.repeated = batch, held
            return batch, held
        if loader.uneven_end == "drop":
            _logger.warning_once(
                f"The streams of the ranks differ in length: {ranks_text(ended)} ran out first, and what "
                "the others still hold is left out. Choose uneven_end='repeat' or 'empty' to read it."
            )
            return _END, None
        return self._fill(batch, held), tuple(max(count, 0) if count != _UNCOUNTED else 1 for count in held)

    def counts(self, batch: object, held: tuple[int, ...], *, last: bool) -> StepCounts | None:
        """Return what each part holds, where that is not a full and real part of the data."""
        if type(batch) is CountedBatch:
            counts: StepCounts = batch.counts
            return counts
        if min(held) < 0:
            return None
        real = tuple(held[rank] for rank in self.readers)
        if 0 in held:
            spare = [self.repeated[rank] for rank in self.readers] if self.loader.uneven_end == "repeat" else real
            return StepCounts(tuple(max(count or kept, 1) for count, kept in zip(real, spare, strict=True)), real)
        if last and (without := self._without_padding(real)) is not None:
            return without
        size = self.loader.spec.step_samples
        return None if size is not None and sum(real) == size and len(set(real)) == 1 else StepCounts(real, real)

    def units(self, counts: StepCounts, batch: object) -> int:
        """Return how far a step moves the position."""
        if type(batch) is CountedBatch or self.loader.makes_batches:
            return self.loader.step_units(counts)
        # A loader that does not batch gives one sample a rank, whose rows are its own.
        return sum(real > 0 for real in counts.real)

    def _rows(self, batch: object) -> int:
        batch = batch.batch if type(batch) is CountedBatch else batch
        self.like = outline(batch) if self.like is None else self.like
        rows = count_rows_like(batch, self.like, self.loader.batch_size)
        return _UNCOUNTED if rows is None else rows

    def _fill(self, batch: object, held: tuple[int, ...]) -> object:
        """Return a batch for a rank that has run out, and the rank's own for the others."""
        if self.first is _END and self.spare is _END:
            # Some rank never had a batch: it borrows one, once, while all ranks are here.
            lender = next(rank for rank, count in enumerate(held) if count != _ENDED)
            self.spare = broadcast_object_list([batch if self.world.rank == lender else None], lender)[0]
            self.repeated = (max(held[lender], 1),) * self.world.size
        if batch is not _END:
            return batch
        spare = self.spare if self.first is _END else self.first
        spare = spare.batch if type(spare) is CountedBatch else spare
        return spare if self.loader.uneven_end == "repeat" else take_rows(spare, slice(0, 0), count_rows(spare))

    def _without_padding(self, real: tuple[int, ...]) -> StepCounts | None:
        """Leave out what torch's DistributedSampler repeats to give all ranks equally many."""
        sampler = get_sampler(self.loader)
        if type(sampler) is not DistributedSampler or sampler.drop_last or min(real) < 1:
            return None
        whole = len(sampler.dataset) % sampler.num_replicas  # type: ignore[arg-type]
        if not whole:
            return None
        return StepCounts(real, tuple(count - (part >= whole) for part, count in enumerate(real)))
