"""Which rank reads which samples: pure arithmetic over indices, without tensors, processes or torch.

A *global batch* is what all ranks read in one step. With `split=False` it is one batch of the loader for each rank;
with `split=True` it is one batch of the loader, divided among the ranks. Laid side by side in the order of the ranks,
the parts of a global batch are the sampler's order, which is why gathered results are in that order too.

A *part* is what one reader gets. Where a replica of the model spans several ranks, these read the same part, and "rank"
in this file counts parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from accel_core._records import record

_T = TypeVar("_T")


@record(frozen=True)
class ShardSpec:
    """How batches are shared out, and the part asked for."""

    ranks: int = 1  # number of ranks that share the data
    rank: int = 0  # the rank whose part it is
    batch_size: int | None = None  # samples in a full batch of the loader; `None` where batches have no fixed size
    split: bool = False  # cut each batch in `ranks` parts, instead of giving each rank a batch of its own
    even: bool = True  # fill the last global batch with samples from the start, so that all ranks read equally many
    drop_last: bool = False  # leave out the last global batch if it is not full

    @property
    def step_samples(self) -> int | None:
        """Samples in a full global batch, or `None` where batches have no fixed size."""
        if self.batch_size is None:
            return None
        return self.batch_size if self.split else self.batch_size * self.ranks


@record(frozen=True)
class StepCounts:
    """What each part of one step holds."""

    rows: tuple[int, ...]  # samples in the batch of each part; 0 for one that gets none
    # How many of them, counted from the first, are there for the first time; the others are repeats.
    real: tuple[int, ...]

    @property
    def total(self) -> int:
        """Samples that the step reads for the first time, over all parts."""
        return sum(self.real)

    @property
    def readers(self) -> tuple[int, ...]:
        """The parts that get a batch in this step."""
        return tuple(part for part, rows in enumerate(self.rows) if rows)

    def over(self, parts: Sequence[int]) -> StepCounts:
        """Return what the ranks of a world hold, where several ranks read the same part."""
        first: dict[int, int] = {}
        for rank, part in enumerate(parts):
            first.setdefault(part, rank)
        real = tuple(self.real[part] if first[part] == rank else 0 for rank, part in enumerate(parts))
        return StepCounts(tuple(self.rows[part] for part in parts), real)


Note = Callable[[int, StepCounts], None]


def _no_note(step: int, counts: StepCounts) -> None:
    """Let counts go that nobody asked for."""


def shard_batches(
    batches: Iterable[Sequence[_T]], spec: ShardSpec, *, pool: Iterable[_T] = (), note: Note = _no_note
) -> Iterator[list[_T]]:
    """Yield the batches of one rank."""
    parts = _split_batches if spec.split else _whole_batches
    return parts(batches, spec, list(pool), note)


def _whole_batches(batches: Iterable[Sequence[_T]], spec: ShardSpec, pool: list[_T], note: Note) -> Iterator[list[_T]]:
    """Give each rank every `ranks`-th batch."""
    ranks, rank, size = spec.ranks, spec.rank, spec.batch_size
    fills = spec.even and not spec.drop_last
    wanted = ranks * size if size is not None else 0
    full = [size] * ranks
    first: list[list[_T]] = []
    lengths: list[int] = []
    own: list[_T] = []
    step = 0
    for batch in batches:
        if len(lengths) == ranks:
            # Not the last step, as a batch follows: its short batches stay short, and are counted as they are.
            note(step, StepCounts(tuple(lengths), tuple(lengths)))
            yield own
            step, lengths = step + 1, []
        indices = batch if isinstance(batch, (list, tuple)) else list(batch)
        if len(lengths) == rank:
            own = list(indices)
        # Of the other ranks' batches only the lengths are kept: thousands of ranks have thousands of batches in every
        # step.
        lengths.append(len(indices))
        if fills and len(pool) < wanted:
            pool.extend(indices[: wanted - len(pool)])
        elif fills and size is None and len(first) < ranks:
            first.append(list(indices))
        # A full step goes out at once. Any other waits for the next batch, because the last step is filled up.
        if len(lengths) == ranks and lengths == full:
            yield own
            step, lengths = step + 1, []
    if not lengths or (spec.drop_last and len(lengths) < ranks):
        return
    given, missing = len(lengths), ranks - len(lengths)
    real = tuple(lengths) + (0,) * missing
    own = own if rank < given else []
    rows = real
    if fills and size is not None:
        target = max(size, *real) if pool else 0
        before = sum(target - length for length in real[:rank])
        own = own + list(itertools.islice(itertools.cycle(pool), before, before + target - real[rank]))
        rows = (target,) * ranks
    elif fills:
        repeats = list(itertools.islice(itertools.cycle(first), missing))
        own = own if rank < given else repeats[rank - given]
        rows = (*lengths, *map(len, repeats))
    note(step, StepCounts(rows, real))
    if fills or rank < given:
        yield own


def _split_batches(batches: Iterable[Sequence[_T]], spec: ShardSpec, pool: list[_T], note: Note) -> Iterator[list[_T]]:
    """Give each rank its part of every batch."""
    rank, size = spec.rank, spec.batch_size
    held: list[_T] | None = None
    step = 0
    for batch in batches:
        if held is not None:
            part, counts = _split(held, spec, pool, last=False)
            note(step, counts)
            yield part[rank]
            step, held = step + 1, None
        indices = list(batch)
        full = max(size or 0, len(indices))
        if len(pool) < full:
            pool.extend(indices[: full - len(pool)])
        if size is not None and len(indices) == size and size % spec.ranks == 0:
            each = size // spec.ranks
            yield indices[rank * each : (rank + 1) * each]
            step += 1
        else:
            held = indices  # the last batch is cut in another way, and whether it is shows only with the next
    if held is None:
        return
    part, counts = _split(held, spec, pool, last=True)
    note(step, counts)
    if part[rank]:
        yield part[rank]


def _split(batch: list[_T], spec: ShardSpec, pool: list[_T], *, last: bool) -> tuple[list[list[_T]], StepCounts]:
    """Cut a batch of any size in one part a rank."""
    ranks, length = spec.ranks, len(batch)
    # Only the last batch may leave a rank without a part: after any other, ranks would be at different steps.
    if spec.even or (not last and length < ranks):
        each = -(-max(length, (spec.batch_size or 0) if last else 0) // ranks)
        real = tuple(max(0, min(each, length - rank * each)) for rank in range(ranks))
        batch = batch + list(itertools.islice(itertools.cycle(pool), each * ranks - length))
        bounds = [rank * each for rank in range(ranks + 1)]
    elif last:
        each = -(-max(length, spec.batch_size or 0) // ranks)
        bounds = [min(length, rank * each) for rank in range(ranks + 1)]
        real = ()
    else:
        bounds = [rank * length // ranks for rank in range(ranks + 1)]
        real = ()
    parts = [batch[begin:end] for begin, end in itertools.pairwise(bounds)]
    rows = tuple(len(part) for part in parts)
    return parts, StepCounts(rows, real or rows)


def shard_stream(samples: Iterable[_T], spec: ShardSpec) -> Iterator[tuple[list[_T], StepCounts | None]]:
    """Yield one rank's part of each global batch of a stream that every rank reads."""
    window = spec.step_samples or spec.ranks
    part = window // spec.ranks
    mine = slice(spec.rank * part, (spec.rank + 1) * part)
    first: list[_T] = []
    gathered: list[_T] = []
    for sample in samples:
        gathered.append(sample)
        if len(gathered) == window:
            yield gathered[mine], None
            first = first or gathered
            gathered = []
    if not gathered or spec.drop_last:
        return
    real = tuple(max(0, min(part, len(gathered) - rank * part)) for rank in range(spec.ranks))
    gathered += itertools.islice(itertools.cycle(first or list(gathered)), window - len(gathered))
    yield gathered[mine], StepCounts((part,) * spec.ranks, real)


def count_steps(batches: int, spec: ShardSpec, *, samples: int | None = None) -> int:
    """Return how many batches one rank gets."""
    if spec.split:
        if spec.even or spec.drop_last or not batches or samples is None or spec.batch_size is None:
            return batches
        last = samples - (batches - 1) * spec.batch_size
        return batches - (last <= spec.rank * (spec.batch_size // spec.ranks))
    rounds, left = divmod(batches, spec.ranks)
    if spec.drop_last or not left:
        return rounds
    return rounds + (1 if spec.even else spec.rank < left)


def skip_samples(batches: Iterator[Sequence[_T]], offset: int, keep: int) -> tuple[Iterator[Sequence[_T]], list[_T]]:
    """Drop the first samples of a sequence of batches.

    Only indices pass through here: no sample is read.
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
