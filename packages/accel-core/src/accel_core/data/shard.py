"""Which rank reads which samples: pure arithmetic over indices, without tensors, processes or torch.

A *global batch* is what all ranks read in one step. Cut whole (`split=False`), it is one batch of the loader a rank;
cut in parts (`split=True`), it is one batch of the loader, a part of it a rank. Laid side by side in the order of the
ranks, the parts of a global batch are the sampler's order, which is why gathered results are in that order too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from accel_core._records import record

__all__ = ["Cut", "Tally", "count_samples", "count_steps", "deal", "deal_stream", "skip_samples"]

_T = TypeVar("_T")


@record(frozen=True)
class Cut:
    """How batches are shared out, and the part asked for.

    Attributes:
        ranks: Number of ranks that share the data.
        rank: The rank whose part it is.
        batch_size: Samples in a full batch of the loader; `None` where batches have no fixed size.
        split: Cut each batch in `ranks` parts, instead of giving each rank a batch of its own.
        even: Fill the last global batch with samples from the start, so that all ranks read equally many.
        drop_last: Leave out the last global batch if it is not full.
    """

    ranks: int = 1
    rank: int = 0
    batch_size: int | None = None
    split: bool = False
    even: bool = True
    drop_last: bool = False

    @property
    def step_samples(self) -> int | None:
        """Samples in a full global batch, or `None` where batches have no fixed size."""
        if self.batch_size is None:
            return None
        return self.batch_size if self.split else self.batch_size * self.ranks


@record(frozen=True)
class Tally:
    """What each rank holds in one step.

    Attributes:
        rows: Samples in each rank's batch; 0 for a rank that gets none.
        real: How many of them, counted from the first, are there for the first time; the others are repeats.
    """

    rows: tuple[int, ...]
    real: tuple[int, ...]

    @property
    def total(self) -> int:
        """Samples that the step reads for the first time, over all ranks."""
        return sum(self.real)

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that get a batch in this step."""
        return tuple(rank for rank, rows in enumerate(self.rows) if rows)


Note = Callable[[int, Tally], None]


def _no_note(step: int, tally: Tally) -> None:
    """Let a tally go that nobody asked for."""


def deal(
    batches: Iterable[Sequence[_T]], cut: Cut, *, pool: Iterable[_T] = (), note: Note = _no_note
) -> Iterator[list[_T]]:
    """Yield the batches of one rank.

    Args:
        batches: The loader's batches of indices, the same on every rank.
        cut: How they are shared out.
        pool: Samples from the start of the epoch, for filling up, where `batches` begins in the middle of one.
        note: Told the step and the tally of each step whose parts are not all full and real.

    Yields:
        One list of indices a step.
    """
    parts = _deal_parts if cut.split else _deal_whole
    return parts(batches, cut, list(pool), note)


def _deal_whole(batches: Iterable[Sequence[_T]], cut: Cut, pool: list[_T], note: Note) -> Iterator[list[_T]]:
    """Give each rank every `ranks`-th batch."""
    ranks, rank, size = cut.ranks, cut.rank, cut.batch_size
    fills = cut.even and not cut.drop_last
    wanted = ranks * size if size is not None else 0
    first: list[list[_T]] = []
    together: list[list[_T]] = []
    step = 0
    for batch in batches:
        if len(together) == ranks:
            yield together[rank]
            step += 1
            together = []
        indices = list(batch)
        together.append(indices)
        if fills and len(pool) < wanted:
            pool.extend(indices[: wanted - len(pool)])
        elif fills and size is None and len(first) < ranks:
            first.append(indices)
        if len(together) == ranks and (size is None or len(indices) == size):
            yield together[rank]
            step += 1
            together = []
    if not together or cut.drop_last:
        return
    real = [len(batch) for batch in together] + [0] * (ranks - len(together))
    if fills and size is not None:
        spare = itertools.cycle(pool)
        together += [[] for _ in range(ranks - len(together))]
        together = [batch + list(itertools.islice(spare, size - len(batch))) for batch in together]
    elif fills:
        together += itertools.islice(itertools.cycle(first), ranks - len(together))
    rows = [len(batch) for batch in together] + [0] * (ranks - len(together))
    note(step, Tally(tuple(rows), tuple(real)))
    if rank < len(together):
        yield together[rank]


def _deal_parts(batches: Iterable[Sequence[_T]], cut: Cut, pool: list[_T], note: Note) -> Iterator[list[_T]]:
    """Give each rank its part of every batch."""
    ranks, rank = cut.ranks, cut.rank
    for step, batch in enumerate(batches):
        indices = list(batch)
        full = max(cut.batch_size or 0, len(indices))
        part = -(-full // ranks)
        if len(pool) < full:
            pool.extend(indices[: full - len(pool)])
        if len(indices) == part * ranks:
            yield indices[rank * part : (rank + 1) * part]
            continue
        if cut.drop_last:
            continue
        real = tuple(max(0, min(part, len(indices) - other * part)) for other in range(ranks))
        if cut.even:
            indices += itertools.islice(itertools.cycle(pool), part * ranks - len(indices))
        note(step, Tally((part,) * ranks if cut.even else real, real))
        mine = indices[rank * part : (rank + 1) * part]
        if mine:
            yield mine


def deal_stream(samples: Iterable[_T], cut: Cut) -> Iterator[tuple[list[_T], Tally | None]]:
    """Yield one rank's part of each global batch of a stream that every rank reads.

    Args:
        samples: The stream.
        cut: How it is shared out; `batch_size` must be given, and `even` counts as true.

    Yields:
        The rank's samples, and a tally where the global batch is not full.
    """
    window = cut.step_samples or cut.ranks
    part = window // cut.ranks
    mine = slice(cut.rank * part, (cut.rank + 1) * part)
    first: list[_T] = []
    gathered: list[_T] = []
    for sample in samples:
        gathered.append(sample)
        if len(gathered) == window:
            yield gathered[mine], None
            first = first or gathered
            gathered = []
    if not gathered or cut.drop_last:
        return
    real = tuple(max(0, min(part, len(gathered) - rank * part)) for rank in range(cut.ranks))
    gathered += itertools.islice(itertools.cycle(first or list(gathered)), window - len(gathered))
    yield gathered[mine], Tally((part,) * cut.ranks, real)


def count_steps(batches: int, cut: Cut, *, samples: int | None = None) -> int:
    """Return how many batches one rank gets.

    Args:
        batches: Number of batches of the loader.
        cut: How they are shared out.
        samples: Number of samples in them; needed to be exact where ranks may differ and each batch is cut in parts.
    """
    if cut.split:
        if cut.even or cut.drop_last or not batches or samples is None or cut.batch_size is None:
            return batches
        last = samples - (batches - 1) * cut.batch_size
        return batches - (last <= cut.rank * (cut.batch_size // cut.ranks))
    rounds, left = divmod(batches, cut.ranks)
    if cut.drop_last or not left:
        return rounds
    return rounds + (1 if cut.even else cut.rank < left)


def count_samples(steps: int, samples: int | None, cut: Cut) -> int:
    """Return the position in the epoch, in global samples, after `steps` steps.

    Args:
        steps: Number of global batches read.
        samples: Number of samples in the epoch, where known: repeats at the end do not count.
        cut: How the data is shared out; `batch_size` must be given.
    """
    read = steps * (cut.step_samples or cut.ranks)
    return read if samples is None else min(read, samples)


def skip_samples(batches: Iterator[Sequence[_T]], offset: int, keep: int) -> tuple[Iterator[Sequence[_T]], list[_T]]:
    """Drop the first samples of a sequence of batches.

    Only indices pass through here: no sample is read.

    Args:
        batches: Batches of indices from the start of the epoch.
        offset: Number of samples to drop. A batch that reaches over the border loses its first part.
        keep: Number of samples from the start to return for filling up at the end.

    Returns:
        The batches that are left, and the first `keep` samples dropped.
    """
    pool: list[Any] = []
    while offset > 0:
        batch = next(batches, None)
        if batch is None:
            break
        pool.extend(batch[: max(0, min(len(batch), keep - len(pool), offset))])
        if len(batch) > offset:
            return itertools.chain([batch[offset:]], batches), pool
        offset -= len(batch)
    return batches, pool
