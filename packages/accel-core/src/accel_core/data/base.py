"""What every prepared loader knows: its settings, how its data is shared out, and where it stands."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from accel_core._records import record
from accel_core.data.adapter import DataLoaderAdapter
from accel_core.data.samplers import Around, BatchSamplerShard, IterableDatasetShard, get_sampler, is_exact
from accel_core.data.settings import LoaderSettings, setting
from accel_core.data.shard import ShardSpec, StepCounts
from accel_core.errors import UnknownBatchSizeError
from accel_core.process import world
from accel_core.state.gradient import GradientState

Order = dict[str, Any]
"""States of generators, by name: tensors of torch's, tuples of Python's and NumPy's."""


@record
class EpochState:
    """What one iteration of a loader knows about itself; `iter()` makes it, and nothing of it outlives the epoch."""

    begins_at: int = 0  # global offset that the iteration began at
    full: int = 1  # how far a full step moves the position
    surplus: int = 0  # how much further the steps that were not full have moved it; mostly negative
    steps_before: int = 0  # steps of the epoch before this iteration, as this loader counts them
    batches_before: int = 0  # batches of the loader's own before this iteration
    served: int = 0  # batches given in this iteration
    ended: bool = False  # whether the batch given last is the last one
    first_step: int = 0  # number, among the indices dealt in this iteration, of the first step that is given
    skipped_steps: int = 0  # steps that `skip_batches` passes over
    skipped: int = 0  # samples (or batches, where these have no fixed size) that `skip_batches` passed over
    counts: dict[int, StepCounts] | None = None  # by step, what the parts hold, where they are not all full and real
    order: Order | None = None  # states of the generators when the order was drawn
    # Whether `order` was captured after the seed that torch takes for workers, or it took none.
    drawn_late: bool = False
    replay: dict[str, Any] | None = None  # a position whose order is drawn once more in this iteration
    # Notes in the gradient state that a batch is given; looked up once, not at every batch.
    advance: Callable[[Any], None] | None = None
    state: Any = None  # state of the `StatefulDataLoader` after the batch given last

    @property
    def offset(self) -> int:
        """Global offset after the batch given last."""
        passed = self.skipped if self.served else 0
        return self.begins_at + passed + self.served * self.full + self.surplus

    def without_batches(self) -> EpochState:
        """Return what of it can be copied with the loader: numbers and the order."""
        return dataclasses.replace(self, counts=None, replay=None, advance=None, state=None)


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
        with contextlib.suppress(TypeError, AttributeError):  # not every dataset knows its length
            if not getattr(self, "_drop_last", False):
                length = getattr(self, "total_dataset_length", -1)
                size = getattr(self, "total_batch_size", None)
                if size and length >= 0:
                    self.remainder = length % size
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Note that an iteration ended."""
        self.gradient_state._remove_dataloader(self)


class LoaderBase(DataLoaderAdapter, DataLoaderStateMixin):
    """The facts of a prepared loader, and its bookkeeping of every batch.

    Attributes:
        settings (LoaderSettings): What the loader was asked to do.
        epoch (EpochState): What the latest iteration knows about itself.
        iteration (int): Number of epochs read; what `set_epoch` set.
        counts (StepCounts | None): What each part holds in the current step, where they are not all full and real.
        pending (dict | None): Position that the next iteration begins at.
    """

    settings: LoaderSettings = LoaderSettings()
    epoch: EpochState = EpochState()
    iteration: int = 0
    counts: StepCounts | None = None
    pending: dict[str, Any] | None = None
    _state_loaded: bool = False
    _seedless: bool = False
    _seed_agreed: bool = False
    _origin: LoaderBase | None = None
    _stand_in: weakref.ref[LoaderBase] | None = None

    device: torch.device | None = setting("device")
    rng_types: list[Any] | None = setting("rng_types")
    synchronized_generator: torch.Generator | None = setting("synchronized_generator")
    skip_batches: int = setting("skip_batches")
    torch_device_mesh: Any = setting("torch_device_mesh")
    split_batches: bool = setting("split_batches")
    slice_fn: Callable[..., Any] = setting("slice_fn")
    uneven_end: str = setting("uneven_end")
    local_ranks: int = setting("local_ranks")
    _drop_last: bool = setting("drop_last")
    _non_blocking: bool = setting("non_blocking")

    def __repr__(self) -> str:
        spec, size = self.spec, self._own_batch_size()
        batches = f"batches of {size}" if size else "batches of any size"
        ranks = f"{', split among' if spec.split else ' on each of'} {spec.ranks} ranks" if spec.ranks > 1 else ""
        return f"{type(self).__name__}({type(self.dataset).__name__}, {batches}{ranks}, device={self.device})"

    @property
    def gradient_state(self) -> GradientState:  # type: ignore[override]
        """The state that the steps of all loaders are noted in."""
        return GradientState()

    @property
    def spec(self) -> ShardSpec:
        """How the data is shared out over ranks."""
        if self.shard is not None:
            return self.shard.spec
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.spec
        return ShardSpec(ranks=self.local_ranks or 1, batch_size=self._own_batch_size(), drop_last=self.drop_last)

    @property
    def shard(self) -> BatchSamplerShard | None:
        """This rank's part of the batch sampler, where the loader is shared out over ranks in that way."""
        return self.index_base if isinstance(self.index_base, BatchSamplerShard) else None

    @property
    def index_base(self) -> Any:
        """What gives the loader's indices: its batch sampler, or its sampler where it does not batch."""
        return self.batch_sampler if self.batch_sampler is not None else self.sampler

    @property
    def exact_batches(self) -> BatchSampler | None:
        """The batch sampler whose batches are shared out, where all of them but the last are full; else `None`."""
        inner: BatchSampler = self.index_base if self.shard is None else self.shard.batch_sampler
        return inner if is_exact(inner) and inner.batch_size == self.spec.batch_size else None

    @property
    def batches_indices(self) -> bool:
        """Whether `index_base` gives batches of indices rather than single ones."""
        return self.batch_sampler is not None or isinstance(self.sampler, BatchSampler)

    @property
    def makes_batches(self) -> bool:
        """Whether batches are made of several samples."""
        return self.batch_size is not None or self.batches_indices

    @property
    def parts(self) -> tuple[int, ...]:
        """For each rank of the world, which part of the data it reads."""
        parts = self.settings.parts
        return tuple(range(world.ensure().size)) if parts is None else parts

    def _own_batch_size(self) -> int | None:
        """Return the size of the loader's batches, where they have a fixed one; 1 where it does not batch."""
        if self.batch_size is not None:
            return self.batch_size
        return getattr(self.index_base, "batch_size", None) if self.batches_indices else 1

    @property
    def current_epoch(self) -> EpochState:
        """The iteration that counts for the position: of the loader that skips in this one's place, where one does."""
        stand_in = self._stand_in() if self._stand_in is not None else None
        return self.epoch if stand_in is None else stand_in.epoch

    @property
    def readers(self) -> list[int]:
        """Who reads the data: ranks, workers, samples of a batch, whether it is split, in order, and in parts."""
        spec = self.spec
        order, parts = int(self.keeps_order), int(bool(self.local_ranks))
        return [spec.ranks, self.num_workers, spec.batch_size or 0, int(spec.split), order, parts]

    @property
    def keeps_workers(self) -> bool:
        """Whether workers of an earlier iteration read the next one; torch takes a seed for new workers alone."""
        return self.persistent_workers and self._iterator is not None

    @property
    def keeps_order(self) -> bool:
        """Whether batches come in the order of their indices, whichever worker is first."""
        return self.num_workers < 2 or bool(getattr(self, "in_order", True))

    @property
    def total_batch_size(self) -> int:
        """Samples in a full global batch."""
        size = self.spec.step_samples
        if size is None:
            raise UnknownBatchSizeError(
                f"The batches of this loader have no fixed size; got {type(self.index_base).__name__} without a "
                "batch_size. Count the samples of each batch."
            )
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

    def get_sampler(self) -> Any:
        """Return the sampler that decides the order."""
        return get_sampler(self)

    def set_sampler(self, sampler: object) -> None:
        """Replace the sampler that determines the order of the samples."""
        holder: object = self.batch_sampler if self.batch_sampler is not None else self
        while isinstance(inner := getattr(holder, "batch_sampler", None), BatchSampler) and holder is not self:
            holder = inner
        # Past `DataLoader.__setattr__`, which refuses a new sampler once the loader is made.
        holder.__dict__["sampler"] = sampler
        if holder is not self:
            self.__dict__["sampler"] = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next, and tell sampler and dataset."""
        self.iteration = epoch
        called: set[int] = set()
        targets: tuple[Any, ...] = (self.batch_sampler, get_sampler(self), self.dataset)
        for target in targets:
            if hasattr(target, "set_epoch") and id(target) not in called:
                called.add(id(target))
                target.set_epoch(epoch)

    def state_dict(self) -> Any:
        """Return the state of the `StatefulDataLoader` behind this loader, as of the batch given last."""
        return self.epoch.state or super().state_dict()

    def own_state(self) -> Any:
        """Return the state of the `StatefulDataLoader` behind this loader, as of the batch read last; else `None`."""
        return super().state_dict() if self.use_stateful_dataloader else None

    def load_state_dict(self, state_dict: object) -> None:
        """Set the state of the `StatefulDataLoader` behind this loader."""
        self.forget_position()
        if isinstance(state_dict, dict) and _is_spent(state_dict):
            # torchdata would begin the epoch that is over once more, and draw a seed and an order for it.
            return
        self._state_loaded = True
        super().load_state_dict(state_dict)

    def global_offset(self) -> int:
        """Return the position in the epoch, in samples over all ranks (batches where they have no fixed size)."""
        epoch = self.current_epoch
        if epoch is self.epoch and self.pending is not None:
            return int(self.pending["offset"])
        return epoch.offset

    def forget_position(self) -> None:
        """Stand at the start of the epoch."""
        self.epoch = EpochState()

    def is_over(self, offset: int) -> bool:
        """Return whether no rank has a batch after a position after which this rank has none."""
        shard = self.shard
        if shard is None or shard.even_batches or shard.drop_last:
            return True
        return offset >= (self.epoch_length() or 0)

    def epoch_length(self) -> int | None:
        """Return the length of an epoch as positions count it, over all ranks; `None` where it is not known."""
        base = self.index_base
        with contextlib.suppress(TypeError):
            if self.spec.batch_size is None:
                return base.total_length if isinstance(base, Around) else len(base)
            return self.total_dataset_length * (self.local_ranks or 1)
        return None

    def step_units(self, counts: StepCounts | None) -> int:
        """Return how far a step moves the position: its samples, or its batches where these have no fixed size."""
        spec = self.spec
        if spec.batch_size is None:
            whole = 1 if spec.split else spec.ranks
            return whole if counts is None or spec.split else sum(real > 0 for real in counts.real)
        return counts.total if counts is not None else spec.step_samples or 1

    def own_units(self, counts: StepCounts | None) -> int:
        """Return how far a batch of the loader's own moves the position."""
        return self.step_units(counts)

    def own_skip(self) -> int:
        """Return how many of the loader's own batches are left out at the start."""
        return self.skip_batches * self.step_batches

    @property
    def step_batches(self) -> int:
        """Number of the loader's own batches in a full step."""
        return 1

    def own_batches(self) -> int:
        """Return how many of the loader's own batches of the epoch were read, the one given last included."""
        epoch = self.current_epoch
        return epoch.batches_before + (epoch.skipped_steps + epoch.served) * self.step_batches

    def _serve(self, epoch: EpochState, counts: StepCounts | None, units: int, *, last: bool = False) -> None:
        """Note that a batch is given now."""
        epoch.served += 1
        epoch.surplus += units - epoch.full
        # Setting any attribute of a torch loader costs a call, so full steps set none.
        if self.counts is not counts:
            self.counts = counts
        if last:
            self.end_of_dataloader = epoch.ended = True
            if counts is not None and not self._drop_last:
                self.remainder = counts.total
        (epoch.advance or self.gradient_state._advance)(self)


def _is_spent(state: dict[str, Any]) -> bool:
    """Return whether torchdata's state is of an epoch that is over, and holds nothing of the user's own."""
    snapshot = state.get("_snapshot")
    main = snapshot["_main_snapshot"] if snapshot else state
    readers = snapshot["_worker_snapshots"].values() if snapshot else [state]
    if not state.get("_iterator_finished") or not all("fetcher_state" in each for each in readers):
        return False
    own = [main["_index_sampler_state"]]
    for each in readers:
        own += [each["dataset_state"], (each["fetcher_state"] or {}).get("dataset_iter_state")]
    return all(part is None for part in own)
