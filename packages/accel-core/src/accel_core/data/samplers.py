"""Samplers and datasets that give one rank its part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accel_core.data.shard import ShardSpec, StepCounts, count_steps, shard_batches, shard_stream, skip_samples
from accel_core.errors import ConfigurationError


class SeedableRandomSampler(RandomSampler):
    """A random order that depends on a seed and the epoch alone.

    The generator is seeded with `initial_seed + epoch` when an epoch begins, and the epoch moves on when it ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else int(data_seed)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the order of the current epoch, then move on to the next."""
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch


EXACT_SAMPLERS = (
    *(DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler),
    SeedableRandomSampler,
)
"""Classes whose length and order are known; a subclass of one may do anything."""


def check_split(batch_size: int | None, ranks: int) -> None:
    """Refuse to cut batches in unequal parts."""
    if batch_size is None or batch_size % ranks:
        raise ConfigurationError(
            f"With split_batches=True each batch is cut in one part a rank, so all have one size, a multiple of the "
            f"number of ranks; got batches of {batch_size or 'any size'} and {ranks} ranks. Use a batch size of "
            f"{max(1, round((batch_size or 0) / ranks)) * ranks}, or split_batches=False."
        )


def _spec_of(shard: BatchSamplerShard | IterableDatasetShard, *, even: bool = True) -> ShardSpec:
    """Return how something is shared out, by its attributes as they are now: users may change them."""
    return ShardSpec(
        ranks=shard.num_processes,
        rank=shard.process_index,
        batch_size=shard.batch_size,
        split=shard.split_batches,
        even=even,
        drop_last=shard.drop_last,
    )


def is_exact(batches: object) -> bool:
    """Return whether a batch sampler and its sampler are of classes whose length and order are known."""
    return type(batches) is BatchSampler and type(batches.sampler) in EXACT_SAMPLERS


def batches_from(batch_sampler: BatchSampler, offset: int, keep: int) -> tuple[Iterator[Any], list[Any]]:
    """Return the batches of a batch sampler from a position on."""
    # torch's own class is begun anew after the position, which passes over indices as fast as the sampler gives them;
    # of another class whole batches are drawn and let go.
    if type(batch_sampler) is not BatchSampler or not offset:
        return skip_samples(iter(batch_sampler), offset, keep)
    order = iter(batch_sampler.sampler)
    pool = list(itertools.islice(order, min(keep, offset)))
    left = itertools.islice(order, offset - len(pool), None)
    return iter(BatchSampler(left, batch_sampler.batch_size, batch_sampler.drop_last)), pool


def _drawn(sampler: Sampler[int] | Iterable[int]) -> tuple[Sequence[int], Iterator[int]]:
    """Draw the order of a sampler of torch's; return it, and what ends the sampler's own pass."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler)), iter(())
    order = iter(sampler)
    return list(itertools.islice(order, len(cast("Sized", sampler)))), order


class Around(BatchSampler):
    """A batch sampler that changes what another one gives."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler that the batches are made from."""
        return self.batch_sampler.sampler

    @property
    def total_length(self) -> int:
        """Number of batches that the other one gives."""
        return len(self.batch_sampler)


class BatchSamplerShard(Around):
    """One rank's part of a batch sampler.

    Without `split_batches` the rank gets every `num_processes`-th batch, else its part of every batch. With
    `even_batches` all ranks get equally many full batches: what is missing at the end is filled up with samples from
    the start. Without, the last batch may be shorter on some ranks, and ranks may get one batch fewer.

    Attributes:
        irregular (dict[int, StepCounts]): The steps of the latest iteration whose parts are not all full and real.

    Raises:
        ConfigurationError: `split_batches` with a batch size that is not a multiple of `num_processes`, or not fixed.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        if split_batches:
            check_split(self.batch_size, num_processes)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.irregular: dict[int, StepCounts] = {}

    @property
    def spec(self) -> ShardSpec:
        """How the batches are shared out."""
        return _spec_of(self, even=self.even_batches)

    def steps_from(self, offset: int) -> int:
        """Return how many batches this rank gets from a position on."""
        spec, batches, samples = self.spec, len(self.batch_sampler), self._samples()
        if offset:
            if spec.batch_size is None:
                batches = max(0, batches - offset)
            elif samples is not None:
                samples = max(0, samples - offset)
                batches = samples // spec.batch_size if spec.drop_last else -(-samples // spec.batch_size)
            else:
                batches = max(0, batches - offset // spec.batch_size)
        return count_steps(batches, spec, samples=samples)

    def __len__(self) -> int:
        return self.steps_from(0)

    def __iter__(self) -> Iterator[list[int]]:
        self.irregular = {}
        return self.from_offset(0, self.irregular)

    def from_offset(self, offset: int, counts: dict[int, StepCounts]) -> Iterator[list[int]]:
        """Return this rank's batches from a position on."""
        spec = self.spec
        if is_exact(self.batch_sampler) and spec.batch_size == self.batch_sampler.batch_size:
            return self._looked_up(offset, spec, counts)
        if not offset:  # iterated when the first index is asked for: some samplers draw where they are
            return shard_batches(self.batch_sampler, spec, note=counts.__setitem__)
        if spec.batch_size is None:
            rest = itertools.islice(iter(self.batch_sampler), offset, None)
            return shard_batches(rest, spec, note=counts.__setitem__)
        order, pool = batches_from(self.batch_sampler, offset, spec.step_samples or 0)
        return shard_batches(order, spec, pool=pool, note=counts.__setitem__)

    def _looked_up(self, offset: int, spec: ShardSpec, counts: dict[int, StepCounts]) -> Iterator[list[int]]:
        """Yield this rank's batches, and look at no index of other ranks before the last step."""
        batches = self.batch_sampler
        whole, ending = _drawn(batches.sampler)
        window = spec.step_samples or 1
        part = window // spec.ranks
        steps = max(0, len(whole) - offset) // window if part * spec.ranks == window else 0
        for start in range(offset + spec.rank * part, offset + steps * window, window):
            yield [*whole[start : start + part]]
        end = offset + steps * window
        rest = BatchSampler(itertools.chain(whole[end:], ending), batches.batch_size, batches.drop_last)
        pool = whole[: min(window, end)]
        yield from shard_batches(rest, spec, pool=pool, note=lambda step, found: counts.update({steps + step: found}))

    def _samples(self) -> int | None:
        """Return the number of samples of an epoch, where it can be known without reading the order."""
        try:
            return len(self.sampler)
        except (AttributeError, TypeError):
            return None

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler, or its sampler, which epoch comes."""
        targets: tuple[Any, ...] = (self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        for target in targets:
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)


class CountedSample(NamedTuple):
    """A sample of a global batch that is not full, with that step's counts."""

    sample: object
    counts: StepCounts


class CountedBatch(NamedTuple):
    """A batch of a global batch that is not full, with that step's counts; it is pinned and moved as any nest."""

    batch: object
    counts: StepCounts


class CountedCollate:
    """A collate function that hands on the counts of its samples."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: object) -> object:
        """Collate samples, or convert a single one."""
        if type(samples) is CountedSample:
            return CountedBatch(self.collate_fn(samples.sample), samples.counts)
        if type(samples) is list and samples and type(samples[0]) is CountedSample:
            return CountedBatch(self.collate_fn([sample.sample for sample in samples]), samples[0].counts)
        return self.collate_fn(samples)


class IndexShard(BatchSamplerShard):
    """One rank's part of a sampler, for a loader that does not batch (`batch_size=None`)."""

    def __init__(
        self, sampler: Sampler[int], num_processes: int, process_index: int, *, even_batches: bool = True
    ) -> None:
        super().__init__(
            BatchSampler(sampler, 1, drop_last=False), num_processes, process_index, even_batches=even_batches
        )

    def from_offset(self, offset: int, counts: dict[int, StepCounts]) -> Iterator[Any]:
        """Return this rank's indices, single ones, from a position on."""
        return (batch[0] for batch in super().from_offset(offset, counts))


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's part of a stream that every rank reads from its start.

    Attributes:
        epoch (int): The epoch that was set last.

    Raises:
        ConfigurationError: `split_batches` with a batch size that is not a multiple of `num_processes`.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.tells_counts = False
        self._start = 0

    @property
    def spec(self) -> ShardSpec:
        """How the stream is shared out."""
        return _spec_of(self)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        spec = self.spec
        window = spec.step_samples or spec.ranks
        length = len(cast("Sized", self.dataset))
        return (length // window if self.drop_last else -(-length // window)) * (window // spec.ranks)

    def begin_at(self, start: int) -> None:
        """Let iterations begin in the middle of the stream, until told otherwise."""
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._deal(self._start)

    def _deal(self, start: int) -> Iterator[Any]:
        tells = self.tells_counts
        samples = itertools.islice(iter(self.dataset), start, None) if start else self.dataset
        for part, counts in shard_stream(samples, self.spec):
            if counts is None or not tells:
                yield from part
            else:
                for sample in part:
                    yield CountedSample(sample, counts)


def batch_size_of(dataloader: DataLoader[Any]) -> int | None:
    """Return the size of a loader's batches, or `None` where they have no fixed one."""
    size: Any = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler that decides the order of a loader's samples, or `None`."""
    batches: object = dataloader.batch_sampler
    if batches is None:
        batches = dataloader.sampler
        if not isinstance(batches, BatchSampler):
            return batches
    while isinstance(inner := getattr(batches, "batch_sampler", None), BatchSampler):
        batches = inner
    sampler: Sampler[Any] | None = getattr(batches, "sampler", None)
    return sampler
