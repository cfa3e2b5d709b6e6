"""Prepared loaders: the user's own loader, which also knows its end and its position."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accel_core.comm.objects import broadcast_object_list
from accel_core.data.adapter import DataLoaderAdapter
from accel_core.data.cursor import Cursor, capture_order, replay_order
from accel_core.data.ends import meet
from accel_core.data.indices import Indices
from accel_core.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    TallyBatch,
    get_sampler,
)
from accel_core.data.shard import Cut, Tally, count_samples
from accel_core.data.transfer import placed
from accel_core.data.workers import sheltered
from accel_core.errors import CheckpointMismatchError
from accel_core.options.enums import RNGType
from accel_core.process import world
from accel_core.random import synchronize_rng_states
from accel_core.state.gradient import GradientState

__all__ = ["DataLoaderAdapter", "DataLoaderShard", "DataLoaderStateMixin", "PreparedLoader"]

_END: Any = object()
_EXACT_SAMPLERS = frozenset(
    {
        DistributedSampler,
        RandomSampler,
        SeedableRandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    }
)


class DataLoaderStateMixin:
    """What a loader tells about its end.

    Attributes:
        end_of_dataloader (bool): Whether the batch given last is the last one.
        remainder (int): Number of real samples in the last global batch, 0 where it is full, -1 where that is not
            known.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    gradient_state: GradientState

    def reset(self) -> None:
        """Forget the end of an iteration."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Note that an iteration begins."""
        self.reset()
        with contextlib.suppress(TypeError, AttributeError):
            if not getattr(self, "_drop_last", False):
                length = getattr(self, "total_dataset_length", -1)
                size = getattr(self, "total_batch_size", None)
                if size and length >= 0:
                    self.remainder = length % size
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Note that an iteration ended or was broken off."""
        self.gradient_state._remove_dataloader(self)


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """What the loaders that each rank reads and those that one rank reads have in common.

    Attributes:
        iteration (int): Number of epochs read; what `set_epoch` set.
        skip_batches (int): Batches left out at the start of every iteration.
        tally (Tally | None): What each rank holds in the current step, where parts are not all full and real.
        pending (dict | None): Position that the next iteration begins at.
        order (dict[str, torch.Tensor]): States of the generators when the epoch began.
        begins_at (int): Global offset that the current iteration began at.
        replays (bool): Whether the order of the epoch is being drawn once more, as it was drawn before.
        uneven_end (str): What happens when streams of the ranks differ in length.
        local_ranks (int): Number of ranks that each read a part of their own, 0 where all share one.
    """

    device: torch.device | None = None
    rng_types: list[Any] | None = None
    synchronized_generator: torch.Generator | None = None
    skip_batches: int = 0
    iteration: int = 0
    torch_device_mesh: Any = None
    tally: Tally | None = None
    pending: dict[str, Any] | None = None
    begins_at: int = 0
    _drop_last: bool = False
    _non_blocking: bool = False
    _batches_served: int = 0
    _served_before: int = 0
    replays: bool = False
    uneven_end: str = "drop"
    local_ranks: int = 0
    _origin: PreparedLoader | None = None
    _stand_in: weakref.ref[PreparedLoader] | None = None

    @property
    def gradient_state(self) -> GradientState:  # type: ignore[override]
        """The state that the steps of all loaders are noted in."""
        return GradientState()

    @property
    def cut(self) -> Cut:
        """How the data is shared out over ranks."""
        if self.shard is not None:
            return self.shard.cut
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.cut
        return Cut(ranks=self.local_ranks or 1, batch_size=self._own_batch_size(), drop_last=self.drop_last)

    @property
    def shard(self) -> BatchSamplerShard | None:
        """This rank's part of the batch sampler, where the loader is shared out over ranks in that way."""
        indices = self.batch_sampler if self.batch_sampler is not None else self.sampler
        return indices if isinstance(indices, BatchSamplerShard) else None

    def _own_batch_size(self) -> int | None:
        """Return the size of the loader's batches, where they have a fixed one; 1 where it does not batch."""
        if self.batch_size is not None:
            return self.batch_size
        if self.batch_sampler is None and not isinstance(self.sampler, BatchSampler):
            return 1
        indices = self.batch_sampler if self.batch_sampler is not None else self.sampler
        return getattr(indices, "batch_size", None)

    @property
    def cursor(self) -> Cursor:
        """The position: seed, epoch and offset in global samples."""
        return Cursor(self)

    @property
    def order(self) -> dict[str, torch.Tensor]:
        """States of the generators when the epoch began."""
        return cast("dict[str, torch.Tensor]", self.__dict__.get("_order", {}))

    @property
    def total_batch_size(self) -> int:
        """Samples in a full global batch."""
        size = self.cut.step_samples
        if size is None:
            raise TypeError("The batches of this loader have no fixed size")
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples in an epoch, over all ranks."""
        length = getattr(self.dataset, "total_length", None)
        if length is not None:
            return int(length)
        if not isinstance(self.dataset, IterableDataset):
            with contextlib.suppress(TypeError):
                return len(get_sampler(self))
        data: Any = self.dataset
        if isinstance(data, IterableDatasetShard):
            data = data.dataset
        return len(data)

    @property
    def _index_sampler(self) -> Any:
        if self.use_stateful_dataloader or isinstance(self.dataset, IterableDataset):
            return super()._index_sampler
        indices = self.__dict__.get("_indices")
        if indices is None or indices.loader is not self:
            indices = self.__dict__["_indices"] = Indices(self)
        return indices

    def get_sampler(self) -> Any:
        """Return the sampler that decides the order."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that decides the order."""
        holder: Any = self.batch_sampler if self.batch_sampler is not None else self
        while isinstance(inner := getattr(holder, "batch_sampler", None), BatchSampler) and holder is not self:
            holder = inner
        holder.__dict__["sampler"] = sampler
        if holder is not self:
            self.__dict__["sampler"] = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next, and tell sampler and dataset.

        Args:
            epoch: Number of the epoch.
        """
        self.iteration = epoch
        told: set[int] = set()
        targets: tuple[Any, ...] = (self.batch_sampler, get_sampler(self), self.dataset)
        for target in targets:
            if hasattr(target, "set_epoch") and id(target) not in told:
                told.add(id(target))
                target.set_epoch(epoch)

    def global_offset(self) -> int:
        """Return the position in the epoch, in samples over all ranks (batches where they have no fixed size)."""
        stand_in = self._stand_in() if self._stand_in is not None else None
        if stand_in is not None:
            return stand_in.global_offset()
        if self.pending is not None:
            return int(self.pending["offset"])
        cut = self.cut
        steps = self._batches_served - self._served_before + self.skip_batches * bool(self._batches_served)
        if cut.batch_size is None:
            return self.begins_at + steps * (1 if cut.split else cut.ranks)
        offset = self.begins_at + count_samples(steps, None, cut)
        with contextlib.suppress(TypeError):
            offset = min(offset, self.total_dataset_length)
        return offset

    def forget_position(self) -> None:
        """Stand at the start of the epoch."""
        self.begins_at = 0
        self._served_before = 0
        self.__dict__["_batches_served"] = 0

    def _prologue(self) -> None:
        """Agree on the order of the epoch, and take the position that it begins at."""
        if self.rng_types and _several_ranks():
            own = self.synchronized_generator
            kinds = [kind for kind in self.rng_types if own is not None or RNGType(kind) is not RNGType.GENERATOR]
            if kinds:
                synchronize_rng_states(kinds, own)
            self._agree_on_seed()
        self.tally = None
        self.begins_at = 0
        self._stand_in = None
        if self._origin is not None:
            self._origin._stand_in = weakref.ref(self)
        self.set_epoch(self.iteration)
        self.begin()
        self._served_before = 0

    def _agree_on_seed(self) -> None:
        """Take over rank 0's seed of a seedable sampler, once: ranks may have been seeded differently."""
        sampler = get_sampler(self)
        if isinstance(sampler, SeedableRandomSampler) and not self.__dict__.get("_seed_agreed"):
            sampler.initial_seed = broadcast_object_list([sampler.initial_seed])[0]
            self.__dict__["_seed_agreed"] = True

    def _open(self) -> Iterator[Any]:
        """Return an iterator over the loader's own batches, from the pending position on."""
        pending, self.pending = self.pending, None
        if pending is None:
            self.__dict__["_order"] = capture_order(self)
            return self._skip_stream(self._raw(), 0)
        self._take_position(pending)
        shard = self.dataset if isinstance(self.dataset, IterableDatasetShard) else None
        inside = shard is not None and self.begins_at % (self.cut.step_samples or 1) != 0
        if shard is not None and inside and self.num_workers < 2:
            shard.begin_at(self.begins_at)
        elif inside:
            raise CheckpointMismatchError(
                f"A position inside a global batch cannot be taken up by several workers, each of which reads a stream "
                f"of its own; got the position {self.begins_at}, global batches of {self.cut.step_samples} and "
                f"{self.num_workers} workers. Use num_workers of 0 or 1 to go on with another number of ranks."
            )
        order = self.__dict__["_order"] = pending["order"] or capture_order(self)
        self.replays = True
        try:
            with replay_order(self, order):
                stream = self._raw() if inside else self._skip_stream(self._raw(), self.begins_at)
                if self.use_stateful_dataloader or self._iterates_itself():
                    stream = itertools.chain(list(itertools.islice(stream, 1)), stream)
                elif not isinstance(self.dataset, IterableDataset):
                    cast(Indices, self._index_sampler).prime()
        finally:
            self.replays = False
            if shard is not None:
                shard.begin_at(0)
        return stream

    def _iterates_itself(self) -> bool:
        """Tell whether the user's class has an iteration of its own, which may begin late and yield what it likes."""
        return not self.use_stateful_dataloader and type(self)._user_class.__iter__ is not DataLoader.__iter__

    def _take_position(self, pending: dict[str, Any]) -> None:
        """Count the current iteration from a position on."""
        self.begins_at = pending["offset"]
        full, left = self._steps(0), self._steps(self.begins_at)
        if self.begins_at and full is not None and left is not None:
            self._served_before = full - left
            self.__dict__["_batches_served"] = self._served_before

    def _raw(self) -> Iterator[Any]:
        """Return an iterator of the user's loader class over its batches."""
        if self.num_workers:
            self.worker_init_fn = sheltered(self.worker_init_fn)
        return iter(super().__iter__())

    def _skip_stream(self, stream: Iterator[Any], offset: int) -> Iterator[Any]:
        """Read a stream up to a position, where positions cannot be had from indices."""
        if self.__dict__.pop("_state_loaded", False):
            return stream
        if not self.use_stateful_dataloader and not isinstance(self.dataset, IterableDataset):
            return stream
        return itertools.islice(stream, self._own_batches(offset) if offset else self.own_skip(), None)

    def _own_batches(self, offset: int) -> int:
        """Return how many of the loader's own batches come before a position."""
        cut = self.cut
        return offset // (cut.step_samples or (1 if cut.split else cut.ranks))

    def own_skip(self) -> int:
        """Return how many of the loader's own batches are left out at the start."""
        return self.skip_batches

    def _steps(self, offset: int) -> int | None:
        """Return how many batches this rank gets from `offset` on, where that is certain beforehand."""
        if isinstance(self.dataset, IterableDataset):
            return None
        if self._iterates_itself():
            return None
        if self.local_ranks:
            return None
        shard = self.shard
        inner: Any = shard.batch_sampler if shard is not None else self.batch_sampler
        if type(inner) is not BatchSampler or type(inner.sampler) not in _EXACT_SAMPLERS:
            return None
        if shard is not None:
            steps = shard.steps_from(offset)
        else:
            left = max(0, len(inner.sampler) - offset)  # type: ignore[arg-type]
            steps = left // inner.batch_size if inner.drop_last else -(-left // inner.batch_size)
        return steps if offset else max(0, steps - self.skip_batches)

    def _finish(self) -> None:
        """Note that the batch about to be given is the last one."""
        self.end_of_dataloader = True
        shard = self.shard
        if shard is not None and shard.irregular:
            self.tally = shard.irregular[max(shard.irregular)]
            if not self._drop_last:
                self.remainder = self.tally.total

    def _complete(self) -> None:
        """Note that the epoch was read to its end."""
        self.iteration += 1
        self.__dict__.pop("dl_state_dict", None)
        self.forget_position()
        if self._origin is not None:
            self._origin.iteration = max(self._origin.iteration, self.iteration)
            self._origin._stand_in = None

    def _placed(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over batches on the device; a state is exact only without reading further ahead."""
        return placed(stream, self.device, beside=self._non_blocking and not self.use_stateful_dataloader)


class DataLoaderShard(PreparedLoader):
    """A loader of which each rank reads its own part.

    Args:
        dataset: The dataset.
        device: Where batches go; `None` leaves them where they are.
        rng_types: Random number generators that all ranks take over from rank 0 when an iteration begins.
        synchronized_generator: The generator meant by "generator" in `rng_types`.
        skip_batches: Batches to leave out at the start of every iteration.
        use_stateful_dataloader: Build on torchdata's `StatefulDataLoader`.
        _drop_last: Whether the last, incomplete batch is left out.
        _non_blocking: Copy to the device without waiting.
        torch_device_mesh: The mesh of all ranks, where data parallelism is one of several axes.
        iteration: Number of epochs read before.
        **kwargs: Those of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield this rank's batches, on the device."""
        self._prologue()
        try:
            stream = self._open()
            steps = None if self.use_stateful_dataloader else self._steps(self.begins_at)
            advance = self.gradient_state._advance
            stream = self._placed(stream)
            if self._meets_ranks():
                yield from meet(self, stream)
            elif steps is None:
                yield from self._look_ahead(stream)
            else:
                for batch in itertools.islice(stream, max(0, steps - 1)):
                    advance(self)
                    yield batch
                batch = next(stream, _END)
                if batch is not _END:
                    self._finish()
                    advance(self)
                    yield batch
                    next(stream, None)
            self._complete()
        finally:
            self.end()

    def _meets_ranks(self) -> bool:
        """Tell whether ranks read streams whose ends nobody knows beforehand, so that they have to agree on the end."""
        streams = bool(self.local_ranks) or isinstance(self.dataset, IterableDatasetShard)
        return streams and _several_ranks()

    def _look_ahead(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, each after the one that follows it was read: so the last one is known."""
        advance, keeps_state = self.gradient_state._advance, self.use_stateful_dataloader
        batch = next(stream, _END)
        while batch is not _END:
            state = self._own_state() if keeps_state else None
            following = next(stream, _END)
            if keeps_state:
                self.__dict__["dl_state_dict"] = state
            if following is _END:
                self._finish()
            if type(batch) is TallyBatch:
                self.tally, batch = batch.tally, batch.batch
            advance(self)
            yield batch
            batch = following


def _several_ranks() -> bool:
    here = world.current()
    return here is not None and here.size > 1
