"""Prepared loaders: the user's own loader, which also knows its end and its position."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_core.comm.objects import broadcast_object_list
from accel_core.data.adapter import DataLoaderAdapter
from accel_core.data.base import DataLoaderStateMixin, EpochState, LoaderBase
from accel_core.data.position import (
    Cursor,
    Indices,
    capture_order,
    replay_order,
)
from accel_core.data.rows import count_rows_like, outline
from accel_core.data.samplers import (
    CountedBatch,
    IterableDatasetShard,
    SeedableRandomSampler,
    get_sampler,
)
from accel_core.data.settings import LoaderSettings
from accel_core.data.shard import StepCounts
from accel_core.data.transfer import placed
from accel_core.data.uneven import synchronized_batches
from accel_core.data.workers import ignore_sigterm
from accel_core.errors import CheckpointMismatchError, undone_by
from accel_core.host.run_card import card
from accel_core.logging import get_logger
from accel_core.options.enums import RNGType
from accel_core.process.world import current
from accel_core.random import synchronize_rng_states

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DataLoaderAdapter", "DataLoaderShard", "DataLoaderStateMixin", "PreparedLoader"]

_logger = get_logger(__name__)

_END: object = object()


class PreparedLoader(LoaderBase):
    """What the loaders that each rank reads and those that one rank reads have in common.

    An iteration goes through `_prologue`, `_open`, `_serve` before each batch, and `_complete`.
    """

    _indices: Indices | None = None

    @property
    def cursor(self) -> Cursor:
        """The position: seed, epoch and offset in global samples."""
        return Cursor(self)

    @property
    def steps_done(self) -> int:
        """Number of steps of this epoch that the next iteration leaves out, as they were given before a checkpoint."""
        return 0 if self.pending is None else self._steps_before(self.pending)

    @property
    def _index_sampler(self) -> object:
        if self.use_stateful_dataloader or isinstance(self.dataset, IterableDataset):
            return super()._index_sampler
        if self._indices is None or self._indices.loader is not self:
            self._indices = Indices(self)
        return self._indices

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over this rank's batches, on the device."""
        batches = self._read() if self.pending is None else self._read_on()
        batches = card.timed(self, batches) if card.wanted else batches
        for extension in self.gradient_state.extensions:
            batches = extension.read(self, batches)
        return batches

    @abstractmethod
    def _read(self) -> Iterator[Any]:
        """Yield the batches of an epoch, from the pending position on."""

    def _read_on(self) -> Iterator[Any]:
        """Yield what is left of an epoch, or the next one where nothing is."""
        offset = 0 if self.pending is None else int(self.pending["offset"])
        rest = self._read()
        first = next(rest, _END)
        if first is not _END:
            yield first
        elif offset and self.is_over(offset):
            length, unit = self.epoch_length(), self.cursor.unit
            # Of a stream, whose length is not known, drop_last may leave nothing that makes a global batch.
            if offset > length if length is not None else not self.spec.drop_last:
                _logger.warning(
                    f"The data of this loader end before the position that was loaded, so the next epoch begins; got "
                    f"{'fewer' if length is None else length} {unit}, and a position after {offset} {unit}. "
                    "Resume with the data of the run that was saved."
                )
            rest = self._read()
        yield from rest

    def _prologue(self) -> EpochState:
        """Agree on the order of the epoch, and begin an iteration."""
        # Before anything is drawn: ranks whose generators differ would read different orders.
        if self.rng_types and _several_ranks():
            own = self.synchronized_generator
            kinds = [kind for kind in self.rng_types if own is not None or RNGType(kind) is not RNGType.GENERATOR]
            if kinds:
                synchronize_rng_states(kinds, own)
            self._agree_on_seed()
        self.counts = None
        self._stand_in = None
        if self._origin is not None:
            # Weak, so that a loader made for the rest of one epoch goes when the script lets go of it.
            self._origin._stand_in = weakref.ref(self)
        # Before an iterator is made: samplers mix the epoch into their seed when they are iterated.
        # https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
        self.set_epoch(self.iteration)
        skipped = self.skip_batches
        self.epoch = epoch = EpochState(full=self.step_units(None), first_step=skipped, skipped_steps=skipped)
        self.begin()
        epoch.advance = self.gradient_state._advance
        return epoch

    def _agree_on_seed(self) -> None:
        """Take over rank 0's seed of a seedable sampler, once: ranks may have been seeded differently."""
        sampler = get_sampler(self)
        if isinstance(sampler, SeedableRandomSampler) and not self._seed_agreed:
            sampler.initial_seed = broadcast_object_list([sampler.initial_seed])[0]
            self._seed_agreed = True

    def _open(self, epoch: EpochState) -> Iterator[Any]:
        """Return an iterator over the loader's own batches, from the pending position on."""
        pending, self.pending = self.pending, None
        if pending is None:
            if self._draws_itself():
                epoch.order = capture_order(self)
                epoch.drawn_late = self.keeps_workers
            return self._skip_stream(self._raw(), epoch, self.own_skip())
        self._take_position(epoch, pending)
        shard = self.dataset if isinstance(self.dataset, IterableDatasetShard) else None
        inside = epoch.begins_at % (self.spec.step_samples or 1) != 0 and not self._same_readers(pending)
        if shard is None or not inside:
            return self._replay(epoch, pending, epoch.batches_before if epoch.begins_at else self.own_skip())
        # The position lies inside a global batch of this loader, so the dataset itself begins late. The workers of
        # torch are copies of it, made while the iterator is: they serve this epoch alone.
        persistent = self.persistent_workers
        self.__dict__["persistent_workers"] = False
        shard.begin_at(epoch.begins_at)
        try:
            return self._replay(epoch, pending, 0)
        finally:
            shard.begin_at(0)
            self.__dict__["persistent_workers"] = persistent

    def _replay(self, epoch: EpochState, pending: dict[str, Any], passed: int) -> Iterator[Any]:
        """Return an iterator whose order is drawn as it was when the position was taken."""
        if not self._draws_itself():
            epoch.replay = pending
            # The seed that torch draws for workers was drawn before the position was taken: drawing it once more must
            # not move the generator that the script goes on with.
            with torch.random.fork_rng(devices=[]):
                stream = self._raw()
                # A user's own iteration may be a generator, which draws nothing before its first batch is asked for.
                return itertools.chain(list(itertools.islice(stream, 1)), stream) if self._iterates_itself() else stream
        epoch.order = pending["order"] or capture_order(self)
        epoch.drawn_late = bool(pending["order"] and pending["drawn_late"])
        # The generators are the position's inside the block alone, so whatever draws from them has to do it here.
        with replay_order(self, epoch.order):
            self._seedless = epoch.drawn_late
            stream = self._skip_stream(self._raw(), epoch, passed)
            # Streams, and loaders of torchdata, draw their order when the first sample is asked for.
            return itertools.chain(list(itertools.islice(stream, 1)), stream)

    def _draws_itself(self) -> bool:
        """Return whether the order is drawn where `Indices` does not see it."""
        return self.use_stateful_dataloader or isinstance(self.dataset, IterableDataset)

    def _iterates_itself(self) -> bool:
        """Return whether the user's class has an iteration of its own, which may begin late and yield what it likes."""
        return not self.use_stateful_dataloader and type(self)._user_class.__iter__ is not DataLoader.__iter__

    def _take_position(self, epoch: EpochState, pending: dict[str, Any]) -> None:
        """Count the current iteration from a position on.

        Raises:
            CheckpointMismatchError: What follows the position depends on who reads, and others read now.
        """
        offset = int(pending["offset"])
        if offset:
            self._check_readers(pending)
        epoch.begins_at = offset
        if not offset:
            return
        epoch.first_step = epoch.skipped_steps = 0
        epoch.steps_before = self._steps_before(pending)
        epoch.batches_before = self._own_batches(epoch, pending)
        if self.use_stateful_dataloader:
            epoch.first_step = epoch.steps_before

    def _steps_before(self, pending: dict[str, Any]) -> int:
        """Return how many steps of the epoch lie before a position."""
        offset = int(pending["offset"])
        if not offset:
            return 0
        if self._same_readers(pending):
            return -(-int(pending["steps"]) // self.step_batches)
        full, left = self._steps(0), self._steps(offset)
        return full - left if full is not None and left is not None else -(-offset // self.step_units(None))

    def _same_readers(self, pending: dict[str, Any]) -> bool:
        return bool(self.readers == pending["readers"])

    def _bound_to_readers(self) -> bool:
        """Return whether what comes after an offset depends on who reads."""
        streams = isinstance(self.dataset, IterableDataset)
        # Several workers of a stream read parts of it, each in batches of its own; a rank's own loader gives its own
        # part; the state of a stateful loader counts the batches of one rank.
        return bool(self.local_ranks) or (streams and self.num_workers > 1) or self.use_stateful_dataloader

    def _check_readers(self, pending: dict[str, Any]) -> None:
        before, now = pending["readers"], self.readers
        if not self.keeps_order or not before[4]:
            raise CheckpointMismatchError(
                "Batches that workers give out of order are not the first ones of the epoch; got the position "
                f"{pending['offset']} of a loader with in_order=False and {now[1]} workers. Use in_order=True "
                "in runs that are resumed, or begin this epoch anew with `loader.cursor.rewind()`."
            )
        if self._same_readers(pending):
            return
        parted = any(before[5:]) or (isinstance(self.dataset, IterableDataset) and before[1] > 1)
        if not (parted or self._bound_to_readers()):
            self._check_border(pending, before[2])
            return
        raise CheckpointMismatchError(
            f"What follows the position {pending['offset']} depends on who reads, because each rank or worker reads a "
            f"part of its own; got one of {_readers_text(before)}, and now {_readers_text(now)}. Go on with the same "
            "numbers, or begin this epoch anew with `loader.cursor.rewind()`. A loader that `prepare` splits, with "
            "num_workers of 0 or 1, goes on with any."
        )

    def _check_border(self, pending: dict[str, Any], size_before: int) -> None:
        """Refuse a position inside a batch of a stream that is not split, whose batches are all that can be skipped."""
        size = self.own_units(None)
        plain = isinstance(self.dataset, IterableDataset) and not isinstance(self.dataset, IterableDatasetShard)
        # Between batches of one size a position lies inside a batch only where that is the last one.
        if plain and size != size_before and pending["offset"] % size:
            raise CheckpointMismatchError(
                f"The position {pending['offset']} lies inside a batch of this stream, and its samples would be lost; "
                f"got batches of {size} samples, and of {size_before} when it was saved. Go on with batches of "
                f"{size_before}, or begin this epoch anew with `loader.cursor.rewind()`."
            )

    def _raw(self) -> Iterator[Any]:
        """Return an iterator of the user's loader class over its batches."""
        if self.num_workers:
            self.worker_init_fn = ignore_sigterm(self.worker_init_fn)
        if not self._seedless:
            return iter(super().__iter__())
        # The run that took the position kept its workers, so the seed for these must not come from the same generator.
        own, self.generator, self._seedless = self.generator, torch.Generator(), False
        sampler = get_sampler(self)
        draws_twice = type(sampler).__module__.startswith("torchdata.")  # torchdata's does where workers are new
        before = sampler.generator.get_state() if draws_twice else None
        try:
            stream = iter(super().__iter__())
            if draws_twice and not self._state_loaded:
                sampler.generator.set_state(before)
                stream = iter(super().__iter__())  # whose workers are kept, as they were in that run
            return stream
        finally:
            self.generator = own

    def _skip_stream(self, stream: Iterator[Any], epoch: EpochState, passed: int) -> Iterator[Any]:
        """Read a stream up to a position, where positions cannot be had from indices."""
        if self._state_loaded:
            # torchdata begins by itself where the state that was loaded says: skipping here would leave batches out.
            self._state_loaded = False
            return stream
        if not self._draws_itself():
            return stream
        if passed and not epoch.begins_at:
            epoch.skipped = passed * self.own_units(None)
        return itertools.islice(stream, passed, None)

    def _own_batches(self, epoch: EpochState, pending: dict[str, Any]) -> int:
        """Return how many of the loader's own batches come before a position."""
        if self._same_readers(pending):
            return int(pending["steps"])
        if not self._draws_itself():
            return epoch.steps_before * self.step_batches
        return -(-epoch.begins_at // self.own_units(None))

    def _steps(self, offset: int) -> int | None:
        """Return how many batches this rank gets from `offset` on, where that is certain beforehand."""
        if isinstance(self.dataset, IterableDataset) or self._iterates_itself() or self.local_ranks:
            return None
        shard, inner = self.shard, self.exact_batches
        if inner is None:
            return None
        if shard is not None:
            steps = shard.steps_from(offset)
        else:
            left = max(0, len(get_sampler(self)) - offset)
            steps = left // inner.batch_size if inner.drop_last else -(-left // inner.batch_size)
        return steps if offset else max(0, steps - self.skip_batches)

    def _complete(self) -> None:
        """Note that the epoch was read to its end."""
        self.iteration += 1
        self.forget_position()
        if self._origin is not None:
            # The loader in whose place this one was read may have been read further since: its number never falls.
            self._origin.iteration = max(self._origin.iteration, self.iteration)
            self._origin._stand_in = None

    @contextlib.contextmanager
    def _reading(self, epoch: EpochState) -> Iterator[None]:
        """Enter what this block reads into the gradient state, and leave it in good order."""
        try:
            if epoch.steps_before:
                self.gradient_state._begin_at(self, epoch.steps_before)
            yield
        except GeneratorExit:
            # Broken off, or let go after `next(iter(loader))`: what is known of the batch given last stays until
            # another batch is given. A generator that is collected late must not touch the iteration that came after.
            if self.epoch is epoch:
                self.gradient_state._leave_open(self)
            raise
        except BaseException:
            self.end()
            raise
        self._complete()
        self.end()


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

    Examples:
        >>> loader = accelerator.prepare(loader)
        >>> isinstance(loader, DataLoaderShard)
        True
        >>> loader.total_batch_size  # on all processes together
        16
    """

    def __init__(
        self,
        dataset: object,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        **kwargs: object,
    ) -> None:
        self.settings = LoaderSettings(
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            drop_last=_drop_last,
            non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
        )
        self.iteration = iteration
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    def _read(self) -> Iterator[Any]:
        epoch = self._prologue()
        # Outside of `_reading`: an iteration that could not begin is over, while one that is broken off stays open.
        with undone_by(self.end):
            # A state is exact only without reading further ahead.
            overlapped = self._non_blocking and not self.use_stateful_dataloader
            stream = placed(self._open(epoch), self.device, overlapped=overlapped)
        with self._reading(epoch):
            steps = None if self.use_stateful_dataloader else self._steps(epoch.begins_at)
            if self._meets_ranks():
                yield from synchronized_batches(self, epoch, stream)
            elif steps is None:
                yield from self._look_ahead(epoch, stream)
            else:
                yield from self._count_down(epoch, stream, steps)

    def _meets_ranks(self) -> bool:
        """Return whether ranks read streams whose ends nobody knows beforehand, so that they agree on the end."""
        streams = bool(self.local_ranks) or isinstance(self.dataset, IterableDatasetShard)
        return streams and _several_ranks()

    def _count_down(self, epoch: EpochState, stream: Iterator[Any], steps: int) -> Iterator[Any]:
        """Yield batches whose number is known beforehand, without reading one ahead."""
        advance = self.gradient_state._advance
        # This loop is what a prepared loader costs: all steps but the last are full, and move two counters.
        for batch in itertools.islice(stream, max(0, steps - 1)):
            epoch.served += 1
            advance(self)
            yield batch
        if steps:
            batch = next(stream, _END)
            if batch is _END:
                return
        # torch notices here that the data is at its end, and lets persistent workers rest. Samplers draw their last
        # from their generators, which a position taken at the last batch has to hold.
        next(stream, None)
        if steps:
            counts = self._counts_of(epoch)
            self._serve(epoch, counts, self.step_units(counts), last=True)
            yield batch

    def _look_ahead(self, epoch: EpochState, stream: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, each after the one that follows it was read: so the last one is known."""
        batch = next(stream, _END)
        is_stream = isinstance(self.dataset, IterableDataset)
        like = outline(batch) if is_stream and type(batch) is not CountedBatch else None
        while batch is not _END:
            # Taken before the next batch is read: a state from after that would leave that batch out.
            state = self.own_state()
            following = next(stream, _END)
            epoch.state = state if following is not _END else self.own_state()
            counts = self._counts_of(epoch)
            if type(batch) is CountedBatch:
                counts, batch = batch.counts, batch.batch
            elif counts is None and is_stream:
                counts = self._short_batch(batch, like)
            units = epoch.full if counts is None else self.step_units(counts)
            self._serve(epoch, counts, units, last=following is _END)
            yield batch
            batch = following

    def _counts_of(self, epoch: EpochState) -> StepCounts | None:
        """Return what the parts of the next step hold, where they are not all full and real."""
        noted = self.shard.irregular if self.use_stateful_dataloader and self.shard is not None else epoch.counts
        return noted.pop(epoch.first_step + epoch.served, None) if noted else None

    def _short_batch(self, batch: object, like: object) -> StepCounts | None:
        """Return what a batch of a stream on one process holds, where it is not full; `like` outlines the first one."""
        size = self._own_batch_size()
        rows = count_rows_like(batch, like, size)
        return None if rows is None or rows == size or not self.makes_batches else StepCounts((rows,), (rows,))


def _readers_text(readers: list[int]) -> str:
    """Return who reads, in words."""
    own = " each with a loader of its own part" if any(readers[5:]) else ""
    return f"{readers[0]} ranks{own} with {readers[1]} workers and batches of {readers[2]}"


def _several_ranks() -> bool:
    world = current()
    return world is not None and world.size > 1
