"""Every sample once an epoch: saved on any number of ranks, continued on any other, for every kind of loader.

The ranks are loaders in one process: each reads its part, and of a loader that dispatches, the reading rank alone is
there and what it sends is noted. With worker processes a part of the cases is tried; `ACCEL_LOADER_CASES=10000`, as at
night, tries all.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import os
import random
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_core.data import dispatcher
from accel_core.data.prepare import prepare_data_loader
from accel_core.errors import CheckpointMismatchError
from accel_testing import requires

pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

CASES = int(os.environ.get("ACCEL_LOADER_CASES", "200"))
RANKS = (1, 2, 3, 4)
SIZE = 2
KINDS = {
    "map": {},
    "map dispatched": {"dispatch_batches": True},
    "iterable": {},
    "iterable shared": {"dispatch_batches": False},
    "stateful map": {"use_stateful_dataloader": True},
    "stateful iterable": {"use_stateful_dataloader": True},
    "stateful iterable shared": {"use_stateful_dataloader": True, "dispatch_batches": False},
    "presharded": {"sharding": "local"},
}
WORKERS = {
    "none": {},
    "one": {"num_workers": 1},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "one persistent": {"num_workers": 1, "persistent_workers": True},
}
# Of which cases one in so many is tried; where all are, once.
PARTS = [200] if CASES >= 10000 else [200, pytest.param(50, marks=pytest.mark.full("fuzz by the hundred"))]


class Rows:
    """Samples that are a number and its square."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, index**2])


class Stream(IterableDataset):
    """The same samples as a stream, in another order each epoch with `shuffle`; each worker reads a part.

    The epoch is shared with the workers, as that of a stream of `datasets` is: those that persist would keep the first.
    """

    def __init__(self, length, shuffle):
        self.rows, self.shuffle, self.epoch = Rows(length), shuffle, torch.tensor(0).share_memory_()

    def set_epoch(self, epoch):
        """Choose the epoch's order."""
        self.epoch.fill_(epoch)

    def __iter__(self):
        length = len(self.rows)
        draw = torch.Generator().manual_seed(self.epoch.item())
        order = torch.randperm(length, generator=draw).tolist() if self.shuffle else range(length)
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.rows[index] for index in order[first::step])


class Channel(dispatcher.ScatterChannel):
    """What the reading rank sends, noted."""

    def __init__(self, world):
        super().__init__(world)
        self.sent = Channel.latest = []

    def send(self, steps):
        """Note what each rank but the first is sent."""
        self.sent.append(steps)


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    """Note what a reading rank sends, as nobody is there to receive it."""
    monkeypatch.setattr(dispatcher, "ScatterChannel", Channel)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loader, and who saves and continues it where."""

    kind: str
    shuffle: bool
    workers: str
    before: int
    after: int
    epoch: int
    place: str

    @property
    def streams(self):
        """Whether the data is a stream."""
        return "iterable" in self.kind

    @property
    def dispatched(self):
        """Whether one rank reads for all, where there are several."""
        return self.kind in ("map dispatched", "iterable", "stateful iterable")

    @property
    def length(self):
        """Samples of an epoch; with a sampler of the user's own, as many on each number of ranks."""
        return 24 if self.kind == "presharded" else 23

    def refused(self):
        """Return whether what follows depends on who reads, and others read."""
        if self.before == self.after or (self.dispatched and self.kind != "map dispatched"):
            return False
        parted = self.kind == "iterable shared" and "num_workers" in WORKERS[self.workers]
        return (
            "stateful" in self.kind
            or self.kind == "presharded"
            or (parted and WORKERS[self.workers]["num_workers"] > 1)
        )


class Ranks:
    """The prepared loaders of all ranks."""

    def __init__(self, case, ranks):
        self.loaders = [self._loader(case, ranks, rank) for rank in range(1 if case.dispatched else ranks)]

    def _loader(self, case, ranks, rank):
        torch.manual_seed(11)
        options = {"batch_size": SIZE, **WORKERS[case.workers]}
        if "num_workers" in options:
            options["multiprocessing_context"] = "fork"
        if case.kind == "presharded":
            options["sampler"] = DistributedSampler(range(case.length), ranks, rank, shuffle=case.shuffle)
        elif not case.streams:
            options["shuffle"] = case.shuffle
        data = Stream(case.length, case.shuffle) if case.streams else Rows(case.length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            loader = prepare_data_loader(
                DataLoader(data, **options),
                num_processes=ranks,
                process_index=rank,
                put_on_device=True,
                **KINDS[case.kind],
            )
        if case.dispatched:
            loader.settings = dataclasses.replace(loader.settings, parts=tuple(range(ranks)))
        return loader

    def read(self, steps=None):
        """Return what the ranks read, as steps of parts of samples, of an epoch or of its first steps."""
        parts = [list(self._part(loader, rank, steps)) for rank, loader in enumerate(self.loaders)]
        return [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]

    def _part(self, loader, rank, steps):
        iteration = iter(loader)
        for step, batch in enumerate(itertools.islice(iteration, steps)):
            parts = [batch]
            if isinstance(loader, dispatcher.DataLoaderDispatcher):
                parts += [each.share for each in Channel.latest[step][1:]]
            real = [len(part) for part in parts] if loader.counts is None else loader.counts.real[-len(parts) :]
            if len(parts) == 1 and loader.counts is not None:
                real = [loader.counts.real[rank if len(loader.counts.real) > 1 else 0]]
            yield [tuple(row) for part, rows in zip(parts, real, strict=True) for row in part[:rows].tolist()]

    def save(self):
        """Return position, states of the loaders, and the process's random state."""
        positions = [loader.cursor.state_dict() for loader in self.loaders]
        states = [loader.state_dict() if loader.use_stateful_dataloader else None for loader in self.loaders]
        assert len({position["offset"] for position in positions}) == 1
        return positions[0], states[0], torch.get_rng_state()

    def load(self, position, state, random_state):
        """Load what `save` returned: what rank 0 wrote, on every rank."""
        for loader in self.loaders:
            loader.cursor.load_state_dict(position)
            if state is not None:
                loader.load_state_dict(state)
        torch.set_rng_state(random_state)

    def close(self):
        """End the workers."""
        for loader in self.loaders:
            if hasattr(loader._iterator, "_shutdown_workers"):
                loader._iterator._shutdown_workers()


def count(steps):
    """Return how often each sample came."""
    return collections.Counter(itertools.chain(*steps))


@functools.lru_cache(maxsize=1024)
def straight(case):
    """Return the epochs that ranks read which nobody interrupts."""
    whole = Ranks(case, case.before)
    try:
        torch.manual_seed(5)
        return [whole.read() for _ in range(case.epoch + 1)]
    finally:
        whole.close()


@functools.lru_cache(maxsize=1024)
def interrupted(case):
    """Return what ranks read of an epoch up to a place in it, and what they save there."""
    total = len(straight(dataclasses.replace(case, after=case.before, epoch=1, place="end"))[0])
    source = Ranks(case, case.before)
    try:
        torch.manual_seed(5)
        for _ in range(case.epoch - 1):
            source.read()
        first = source.read({"begin": 1, "middle": total // 2, "near the end": total - 1, "end": total}[case.place])
        return first, source.save()
    finally:
        source.close()


def check(case):
    """Save in an epoch, continue on other ranks, and count the samples of that epoch and of the next one."""
    once = collections.Counter(tuple(row.tolist()) for row in map(Rows(case.length).__getitem__, range(case.length)))
    first, saved = copy.deepcopy(interrupted(dataclasses.replace(case, after=case.before)))
    resumed = Ranks(case, case.after)
    try:
        torch.manual_seed(99)
        resumed.load(*saved)
        if case.refused() and case.place != "end":
            with pytest.raises(CheckpointMismatchError, match=f"{case.before} ranks .* now {case.after} ranks"):
                resumed.read()
            return
        rest = [] if case.place == "end" else resumed.read()
        following = resumed.read()
        assert count(first + rest) == once
        assert count(following) == once
        assert resumed.loaders[0].iteration == case.epoch + 1
        if case.before == case.after:
            epochs = straight(dataclasses.replace(case, place="end"))
            assert first + rest == epochs[case.epoch - 1]
            assert following == epochs[case.epoch]
    finally:
        resumed.close()


def cases(kind, workers):
    """Return the cases of a kind of loader with workers."""
    numbers = itertools.product((False, True), RANKS, RANKS, (1, 2), ("begin", "middle", "near the end", "end"))
    return [Case(kind, shuffle, workers, *rest) for shuffle, *rest in numbers]


def needs(kind):
    """Return the marks of a kind of loader."""
    return [requires("torchdata")] if "stateful" in kind else []


def named(case):
    """Check a case, and name it where it fails."""
    try:
        check(case)
    except Exception as failure:
        raise AssertionError(f"{type(failure).__name__}: {failure}\n{case}") from failure


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(kind)) for kind in KINDS])
def test_every_pair_of_rank_counts(kind):
    """Without workers, each sample of both epochs comes once on every pair of rank counts, or others are refused."""
    for case in cases(kind, "none"):
        named(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("workers", [each for each in WORKERS if each != "none"])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(kind)) for kind in KINDS])
def test_worker_processes(kind, workers, part):
    """The same with worker processes."""
    every = cases(kind, workers)
    random.Random(f"{kind} {workers}").shuffle(every)
    for case in every if CASES >= 10000 else every[: CASES // part]:
        named(case)
