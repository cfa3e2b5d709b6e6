"""Loaders of every kind, stopped anywhere and continued: nothing lost, nothing twice, nobody waits, or a named refusal.

Cases are drawn by number, so a failure names the case that repeats it. `ACCEL_LOADER_CASES` sets how many are tried.
"""

import dataclasses
import os
import random
import warnings

import pytest
import torch
from streams import Pythonic, Stream
from torch.utils.data import BatchSampler, DataLoader, Sampler

from accel_core.data.metrics import gather_for_metrics
from accel_core.data.prepare import prepare_data_loader
from accel_core.data.presharded import already_sharded
from accel_core.errors import CheckpointMismatchError
from accel_core.process.world import ensure
from accel_core.state.gradient import GradientState
from accel_testing import requires
from accel_testing.world import run

CASES = int(os.environ.get("ACCEL_LOADER_CASES", "200"))
ON_RANKS = max(20, CASES // 20)
SAMPLERS = ("sequential", "random", "generator", "seedable", "grouped", "bucket", "eager bucket", "listed", "pythonic")


class Grouped(Sampler):
    """A sampler like those that group samples by length: a permutation, sorted inside of chunks."""

    def __init__(self, length, generator=None):
        self.length, self.generator = length, generator

    def __len__(self):
        return self.length

    def __iter__(self):
        order = torch.randperm(self.length, generator=self.generator).tolist()
        chunks = [sorted(order[first : first + 6], reverse=True) for first in range(0, self.length, 6)]
        return iter([index for chunk in chunks for index in chunk])


class Buckets(BatchSampler):
    """Batches of the sizes given; `size` is what it calls its batch size, if it does."""

    def __init__(self, lengths, size, eager):
        self.lengths, self.eager, self.drop_last = lengths, eager, False
        if size is not None:
            self.batch_size = size
        self.sampler = range(sum(lengths))

    def __len__(self):
        return len(self.lengths)

    def _batches(self, order):
        for length in self.lengths:
            yield [order.pop() for _ in range(length)]

    def _later(self):
        yield from self._batches(torch.randperm(sum(self.lengths)).tolist())

    def __iter__(self):
        return iter(list(self._later())) if self.eager else self._later()


@dataclasses.dataclass(frozen=True)
class Case:
    """One loader, where it is stopped, and who goes on."""

    number: int
    kind: str
    length: int
    size: int
    sampler: str
    lengths: tuple
    even: bool
    drop_last: bool
    split: bool
    workers: int
    persistent: bool
    parted: bool
    epochs: int
    stop: int
    before: int
    after: int
    workers_after: int

    @classmethod
    def draw(cls, number, kind, ranks=None):
        """Draw a case by its number; `ranks` fixes their number."""
        draw = random.Random(f"{kind} {number}")
        before = ranks or draw.randint(1, 3)
        size = draw.randint(1, 4)
        split = draw.random() < 0.25
        size = size * before if split else size
        workers = 2 if draw.random() < 0.08 else 0
        sampler = draw.choice(SAMPLERS) if kind == "map" else "sequential"
        if kind == "stateful":
            sampler = draw.choice(("sequential", "random"))
        lengths = tuple(draw.choice((size, size, draw.randint(1, size))) for _ in range(draw.randint(1, 8)))
        lengths += (draw.choice((size, draw.randint(1, size), size + draw.randint(1, 4))),)
        buckets = "bucket" in sampler or sampler == "listed"
        same = kind == "stateful" or draw.random() < 0.3
        after = before if same or ranks else draw.randint(1, 3)
        if split and size % after:
            after = before
        return cls(
            number=number,
            kind=kind,
            length=sum(lengths) if buckets else draw.randint(1, 30),
            size=size,
            sampler=sampler,
            lengths=lengths,
            even=draw.random() < 0.6,
            drop_last=not buckets and draw.random() < 0.2,
            split=split and sampler != "listed",  # refused: its batches have no fixed size
            workers=workers,
            persistent=bool(workers) and kind != "stateful" and draw.random() < 0.5,
            parted=draw.random() < 0.5,
            epochs=draw.choice((0, 0, 1, 2)),
            stop=draw.randint(1, 6),
            before=before,
            after=after,
            workers_after=draw.choice((workers, workers, 0)),
        )

    def loader(self, ranks, rank, workers, **kwargs):
        """Build the prepared loader of a rank, with generators that tell nothing."""
        torch.manual_seed(self.number)
        options = {"num_workers": workers}
        if workers:
            options |= {"multiprocessing_context": "fork", "persistent_workers": self.persistent}
        if self.kind == "map" and ("bucket" in self.sampler or self.sampler == "listed"):
            size = None if self.sampler == "listed" else self.size
            options["batch_sampler"] = Buckets(self.lengths, size, self.sampler.startswith("eager"))
        else:
            options |= {"batch_size": self.size, "drop_last": self.drop_last}
        if self.sampler in ("random", "seedable"):
            options["shuffle"] = True
        elif self.sampler == "generator":
            options |= {"shuffle": True, "generator": torch.Generator().manual_seed(self.number)}
        elif self.sampler in ("grouped", "pythonic"):
            options["sampler"] = Grouped(self.length) if self.sampler == "grouped" else Pythonic(range(self.length))
        streams = self.kind == "stream" or (self.kind == "stateful" and self.number % 2 == 0)
        data = Stream(self.length, parted=self.parted or workers > 0) if streams else range(self.length)
        if streams:
            options.pop("shuffle", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return prepare_data_loader(
                DataLoader(data, **options),
                num_processes=ranks,
                process_index=rank,
                split_batches=self.split,
                even_batches=self.even,
                use_seedable_sampler=self.sampler == "seedable",
                use_stateful_dataloader=self.kind == "stateful",
                **kwargs,
            )

    def refusable(self):
        """Return whether other readers may be refused: workers read parts of a stream."""
        streams = self.kind != "map"
        return streams and (self.before, self.workers) != (self.after, self.workers_after)


def seed(case, epoch):
    """Give the ranks' generators one state, as `rng_types` does when an epoch begins."""
    torch.manual_seed(1000 * case.number + epoch)
    random.seed(1000 * case.number + epoch)


def read(loader, rank, stop=None):
    """Return the batches of an epoch, each cut to its real samples, and the rows that it has."""
    steps = []
    for batch in loader:
        counts = loader.counts
        rows = batch.tolist()
        steps.append(rows if counts is None else rows[: counts.real[min(rank, len(counts.real) - 1)]])
        assert counts is None or len(counts.real) == 1 or counts.rows[rank] == len(rows)
        assert loader.end_of_dataloader or stop is None or len(steps) <= stop
        if len(steps) == stop:
            break
    return steps


def shut(*loaders):
    """End persistent workers."""
    for loader in loaders:
        if hasattr(loader._iterator, "_shutdown_workers"):
            loader._iterator._shutdown_workers()


def flat(parts):
    """Return the samples of all ranks."""
    return [value for steps in parts for batch in steps for value in batch]


def go_on(case, positions, states):
    """Return what the ranks that go on read, or `None` where they refuse it by name."""
    loaders = [case.loader(case.after, rank, case.workers_after) for rank in range(case.after)]
    rest = []
    try:
        for rank, loader in enumerate(loaders):
            loader.cursor.load_state_dict(positions[0])
            if states is not None:
                loader.load_state_dict(states[rank])
            seed(case, 77)
            rest.append(read(loader, rank))
    except CheckpointMismatchError as refusal:
        if not case.refusable() or "ranks with" not in str(refusal):
            raise
        return None
    finally:
        shut(*loaders)
    assert len({len(steps) for steps in rest}) == 1 or not (case.even or case.drop_last)
    return rest


def check(case):
    """Stop a case, go on, and compare with the epoch as it is without a stop."""
    whole, first, positions, states = [], [], [], []
    for rank in range(case.before):
        loader = case.loader(case.before, rank, case.workers)
        for epoch in range(case.epochs):
            seed(case, epoch)
            read(loader, rank)
        seed(case, 50)
        whole.append(read(loader, rank))
        shut(loader)
    expected = flat(whole)
    assert len(set(expected)) == len(expected)
    step = case.size * (1 if case.split else case.before)
    kept = case.length // step * step if case.drop_last and not (case.workers and case.kind != "map") else case.length
    if not (case.drop_last and case.workers and case.kind != "map"):
        assert len(expected) == kept
    stop = min([case.stop, *map(len, whole)])
    if not stop:
        return
    for rank in range(case.before):
        loader = case.loader(case.before, rank, case.workers)
        for epoch in range(case.epochs):
            seed(case, epoch)
            read(loader, rank)
        seed(case, 50)
        first.append(read(loader, rank, stop))
        positions.append(loader.cursor.state_dict())
        states.append(loader.state_dict() if case.kind == "stateful" else None)
        shut(loader)
    assert [steps[:stop] for steps in whole] == first
    assert len({position["offset"] for position in positions}) == 1
    rest = go_on(case, positions, states if case.kind == "stateful" else None)
    if rest is None:
        return
    if not positions[0]["offset"]:
        # Behind the last batch begins the next epoch.
        assert positions[0]["epoch"] == case.epochs + 1
        assert len(flat(rest)) == len(set(flat(rest)))
        assert case.drop_last or sorted(flat(rest)) == sorted(expected)
        return
    if case.drop_last and case.length - positions[0]["offset"] < case.size * (1 if case.split else case.after):
        # Nothing is left for so many ranks, which begin the next epoch.
        assert len(flat(rest)) == len(set(flat(rest)))
        return
    found = flat(first) + flat(rest)
    assert len(set(found)) == len(found), f"twice: {sorted(found)}"
    if case.drop_last:
        assert case.length - len(found) < case.size * max(case.before, case.after) or case.workers
    else:
        assert sorted(found) == list(range(case.length)), f"lost: {set(range(case.length)) - set(found)}"
    if (case.before, case.workers) == (case.after, case.workers_after):
        assert [a + b for a, b in zip(first, rest, strict=True)] == whole


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("kind", "share"), [("map", 0.55), ("stream", 0.3), pytest.param("stateful", 0.1, marks=requires("torchdata"))]
)
def test_stopped_anywhere_and_continued_by_any_ranks(kind, share):
    """An epoch in two pieces is the epoch: on the ranks as they were, on others, or refused by name."""
    for number in range(int(CASES * share)):
        case = Case.draw(number, kind)
        try:
            check(case)
        except Exception as failure:
            raise AssertionError(f"{type(failure).__name__}: {failure}\n{case}") from failure


def gathered(loader, state, stop=None):
    """Return what a loader gives for metrics, in every form, and check that all forms say the same."""
    found = []
    for step, batch in enumerate(loader, 1):
        rows = batch["rows"]
        one = gather_for_metrics(rows, state)
        names = gather_for_metrics(batch["names"], state)
        things = gather_for_metrics(batch["things"], state)
        ragged = gather_for_metrics(batch["ragged"], state)
        boxes = gather_for_metrics(batch["boxes"], state)
        nested = gather_for_metrics(batch, state)
        assert type(nested) is dict
        assert one.tolist() == nested["rows"].tolist() == [int(name) for name in names]
        assert things == nested["things"] == [{"index": value} for value in one.tolist()]
        assert [int(row[0]) for row in ragged] == [int(row[0]) for row in nested["ragged"]] == one.tolist()
        assert [int(box[0, 0]) for box in boxes] == [int(box[0, 0]) for box in nested["boxes"]] == one.tolist()
        found += one.tolist()
        if step == stop:
            break
    return found


def everything(indices):
    """Make a batch of numbers, names, objects, rows whose width differs between batches, and tensors of any shapes."""
    return {
        "rows": torch.tensor(indices),
        "names": [str(index) for index in indices],
        "things": [{"index": index} for index in indices],
        "ragged": torch.tensor([[index] * (max(indices) % 5 + 1) for index in indices]),
        "boxes": [torch.full((20 + (index % 3 if len(indices) % 2 else 0), 2), float(index)) for index in indices],
    }


def check_on_ranks(case, here):
    """Read a case on real ranks, dispatched or not, with every end; stop it and go on."""
    state = GradientState()
    draw = random.Random(f"ranks {case.number}")
    streams = case.kind == "stream"
    dispatch = draw.random() < 0.4 and case.sampler != "generator"
    own = streams and not dispatch and draw.random() < 0.5
    end = draw.choice(("drop", "repeat", "empty"))
    lengths = [draw.randint(0, 9) for _ in range(here.size)]

    def make():
        torch.manual_seed(case.number)
        options = {"collate_fn": everything}
        if own:
            data = Stream(lengths[here.rank], first=100 * here.rank)
            loader = already_sharded(DataLoader(data, batch_size=case.size, **options))
            return prepare_data_loader(loader, uneven_end=end)
        loader = case.loader(here.size, here.rank, 0, dispatch_batches=dispatch)
        loader.collate_fn = (
            type(loader.collate_fn)(everything) if hasattr(loader.collate_fn, "collate_fn") else everything
        )
        return loader

    seed(case, 0)
    whole = gathered(make(), state)
    seed(case, 0)
    loader = make()
    seed(case, 0)
    first = gathered(loader, state, case.stop)
    position = loader.cursor.state_dict()
    resumed = make()
    resumed.cursor.load_state_dict(position)
    seed(case, 9)
    if position["offset"]:
        rest = gathered(resumed, state)
        assert len(set(first + rest)) == len(first + rest), (first, rest)
    uneven = not case.even and not streams and not dispatch
    if own and end != "drop":
        assert sorted(whole) == [100 * rank + value for rank in range(here.size) for value in range(lengths[rank])]
    elif not own and not case.drop_last and (here.is_main or not uneven):
        assert sorted(whole) == list(range(case.length)), (whole, dispatch)
        if position["offset"]:
            assert sorted(first + rest) == list(range(case.length)), (first, rest, dispatch)


def check_cases(ranks, cases):
    """Check some cases, and name one that fails."""
    for number in range(cases):
        case = Case.draw(number, ("map", "stream")[number % 2], ranks=ranks)
        try:
            check_on_ranks(case, ensure())
        except Exception as failure:
            raise AssertionError(f"{type(failure).__name__}: {failure}\n{case}") from failure


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_RANKS), (3, ON_RANKS // 2)])
def test_ranks_gather_every_sample_once(ranks, cases):
    """Ranks gather each sample once and in one structure, stopped and continued, and nobody waits for ever."""
    run(check_cases, ranks, (ranks, cases), quiet=180)
