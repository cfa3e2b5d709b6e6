"""Loaders that one rank reads for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from accel_core._records import record
from accel_core.comm.batch import slice_tensors
from accel_core.data.base import EpochState
from accel_core.data.loader import PreparedLoader
from accel_core.data.rows import count_rows, count_rows_like, join_rows, outline, take_rows
from accel_core.data.scatter import ScatterChannel
from accel_core.data.settings import LoaderSettings, mesh_parts
from accel_core.data.shard import ShardSpec, StepCounts
from accel_core.data.transfer import placed
from accel_core.errors import DataError
from accel_core.process.world import ensure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_END: Any = object()


class DataLoaderDispatcher(PreparedLoader):
    """A loader that rank 0 reads, and of which it sends each rank its part.

    Only rank 0 needs the data. Batches may hold anything that can be pickled; their tensors travel as raw bytes. When
    reading fails on rank 0, every rank gets an error.

    Args:
        dataset: The dataset.
        split_batches: Cut each batch in one part a rank; else each rank gets a batch.
        skip_batches: Number of each rank's batches to leave out at the start of every iteration.
        use_stateful_dataloader: Build on torchdata's `StatefulDataLoader`.
        _drop_last: Whether the last global batch is left out if it is not full.
        _non_blocking: Copy to the device without waiting.
        slice_fn: Takes a rank's part out of a global batch: called on every rank with the batch, a slice, and
            `process_index` and `num_processes`. With the default, each rank is sent its own part alone.
        torch_device_mesh: The mesh of all ranks, where data parallelism is one of several axes.
        iteration: Number of epochs read before.
        **kwargs: Those of `torch.utils.data.DataLoader`.

    Examples:
        >>> accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        >>> loader = accelerator.prepare(loader)
        >>> isinstance(loader, DataLoaderDispatcher)
        True
    """

    def __init__(
        self,
        dataset: object,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        **kwargs: object,
    ) -> None:
        self.settings = LoaderSettings(
            device=ensure().device,
            skip_batches=skip_batches,
            split_batches=split_batches,
            drop_last=_drop_last,
            non_blocking=_non_blocking,
            slice_fn=slice_fn or slice_tensors,
            torch_device_mesh=torch_device_mesh,
            parts=None if torch_device_mesh is None else mesh_parts(torch_device_mesh),
        )
        self.iteration = iteration
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    @property
    def spec(self) -> ShardSpec:
        """How the data is shared out over ranks."""
        parts = self.parts
        return ShardSpec(
            ranks=max(parts) + 1,
            rank=parts[ensure().rank],
            batch_size=self._own_batch_size(),
            split=self.split_batches,
            drop_last=self._drop_last,
        )

    @property
    def readers(self) -> list[int]:
        """Who reads the data: rank 0 alone, so what it reads depends on its workers and batches, not on the ranks."""
        return [1, self.num_workers, self._own_batch_size() or 0, 0, int(self.keeps_order), 0]

    def state_dict(self) -> Any:
        """Return the state of the `StatefulDataLoader` on rank 0, which reads; the other ranks have none."""
        return super().state_dict() if ensure().is_main else {}

    def load_state_dict(self, state_dict: object) -> None:
        """Set the state on rank 0."""
        if ensure().is_main:
            super().load_state_dict(state_dict)

    def _read(self) -> Iterator[Any]:
        epoch = self._prologue()
        with self._reading(epoch):
            world = ensure()
            # Made anew for each iteration: all ranks begin with one length of messages, whatever ended the one before.
            channel = ScatterChannel(world)
            for step in self._lead(epoch, channel) if world.is_main else self._follow(epoch, channel):
                self._serve(epoch, step.counts, step.units, last=step.last)
                if step.last:
                    self.remainder = step.counts.total if step.counts is not None else self.spec.step_samples or -1
                yield next(placed(iter((self._own(step.share),)), self.device))

    def __len__(self) -> int:
        spec, batches = self.spec, super().__len__()
        if not spec.split:
            batches = batches // spec.ranks if spec.drop_last else -(-batches // spec.ranks)
        return max(0, batches - self.skip_batches * isinstance(self.dataset, IterableDataset))

    @property
    def step_batches(self) -> int:
        """Number of the loader's own batches in a full step."""
        return 1 if self.split_batches else self.spec.ranks

    def own_units(self, counts: StepCounts | None) -> int:
        """Return how far a batch of the loader's own moves the position."""
        size = self._own_batch_size()
        return 1 if size is None else size if counts is None else counts.total

    def _steps(self, offset: int) -> int | None:
        if isinstance(self.dataset, IterableDataset):
            return None
        spec = self.spec
        if spec.step_samples is None:
            return max(0, len(self) - offset // (1 if spec.split else spec.ranks))
        left = self.total_dataset_length - offset
        return max(0, left // spec.step_samples if spec.drop_last else -(-left // spec.step_samples))

    def _lead(self, epoch: EpochState, channel: ScatterChannel) -> Iterator[_Step]:
        """Read global batches, send each rank its part, and yield one's own."""
        parts = self.parts
        with channel.telling():
            groups = self._global_batches(self._open(epoch), epoch)
            group = next(groups, _END)
        if group is _END:
            channel.send([None] * len(parts))
        while group is not _END:
            # A step is sent with whether it is the last, so the batches after it are read before. The state is taken
            # before that: one from after it would leave them out.
            with channel.telling():
                state = self.own_state()
                following = next(groups, _END)
                epoch.state = state if following is not _END else self.own_state()
            steps = [_Step(share, group.counts, group.units, following is _END) for share in group.shares]
            # Ranks that read the same part are sent the same object.
            channel.send([steps[part] for part in parts])
            yield steps[parts[0]]
            group = following

    def _follow(self, epoch: EpochState, channel: ScatterChannel) -> Iterator[_Step]:
        """Yield the parts that rank 0 sends."""
        # The position was loaded on every rank and moves on every rank by what rank 0 tells, so that it is the same
        # wherever it is saved.
        pending, self.pending = self.pending, None
        if pending is not None:
            self._take_position(epoch, pending)
        last = False
        while not last:
            message = channel.receive()
            # Sent only where the epoch has no step at all: after a last step nothing follows.
            if message is None:
                return
            last = message.last
            yield message

    def _own(self, share: object) -> object:
        """Return this rank's part of what was sent: all of it, or what `slice_fn` takes out."""
        if not isinstance(share, _Whole):
            return share
        spec = self.spec
        mine = slice(spec.rank * share.part, (spec.rank + 1) * share.part)
        return self.slice_fn(share.batch, mine, process_index=spec.rank, num_processes=spec.ranks)

    def _global_batches(self, stream: Iterator[Any], epoch: EpochState) -> Iterator[_Group]:
        """Yield what all ranks read in one step: a part for each, and counts where they are not full."""
        spec = self.spec
        wanted = 1 if spec.split else spec.ranks
        first: Any = None
        like: Any = None
        while True:
            group = list(itertools.islice(stream, wanted))
            if not group:
                return
            like = outline(group[0]) if like is None else like
            rows = [count_rows_like(batch, like, spec.batch_size) for batch in group]
            known = [count for count in rows if count is not None]
            units = len(group) if spec.batch_size is None or not self.makes_batches else sum(known)
            # The position is the same on all ranks, so what rank 0 skipped is sent with the first step.
            units, epoch.skipped = units + (0 if epoch.served else epoch.skipped), 0
            if not self.makes_batches or len(known) < len(rows):
                if len(group) < spec.ranks and spec.drop_last:
                    return
                first = first or group
                yield _one_each(group, first, spec, rows, units)
                continue
            full = len(group) * (spec.batch_size or max(known))
            short = len(group) < wanted or sum(known) < full
            if short and spec.drop_last:
                # Only what comes last is left out; a short batch inside the data is a batch like any other.
                ahead = list(itertools.islice(stream, 1))
                if not ahead:
                    return
                stream = itertools.chain(ahead, stream)
            first = first if first is not None else group[0]
            if self.slice_fn is slice_tensors and not spec.split and not short and len(set(known)) == 1:
                counts = None if spec.batch_size is not None else StepCounts(tuple(known), tuple(known))
                yield _Group(group, counts, units)
                continue
            yield self._cut_up(group, known, first, spec, units, full=spec.step_samples)

    def _cut_up(
        self, group: list[Any], rows: list[int], first: object, spec: ShardSpec, units: int, *, full: int | None
    ) -> _Group:
        """Cut the rows of some batches in equal parts, filled up with the first rows of all."""
        total = sum(rows)
        part = -(-total // spec.ranks)
        whole = join_rows(group, rows) if len(group) > 1 else group[0]
        missing = part * spec.ranks - total
        if count_rows(whole, total) != total:
            return _one_each(group, [first], spec, rows, units)
        held = count_rows_like(first, first, spec.batch_size) or 0
        # In a loop: the first batch may hold fewer rows than are missing.
        while missing > 0 and held:
            some = take_rows(first, slice(0, missing), held)
            whole = join_rows([whole, some], [part * spec.ranks - missing, min(missing, held)])
            missing -= min(missing, held)
        real = tuple(max(0, min(part, total - rank * part)) for rank in range(spec.ranks))
        counts = None if total == full else StepCounts((part,) * spec.ranks, real)
        if self.slice_fn is not slice_tensors:
            return _Group([_Whole(whole, part)] * spec.ranks, counts, units)
        rows_now = part * spec.ranks
        shares = [take_rows(whole, slice(rank * part, (rank + 1) * part), rows_now) for rank in range(spec.ranks)]
        return _Group(shares, counts, units)


@record(frozen=True)
class _Group:
    """What all ranks read in one step."""

    shares: list[Any]  # for each part, its batch
    counts: StepCounts | None  # what the parts hold, where they are not all full and real
    units: int  # how far the step moves the position


@record(frozen=True)
class _Step:
    """What one rank reads in one step; `last` where no other follows."""

    share: object
    counts: StepCounts | None
    units: int
    last: bool


class _Whole:
    """A global batch of which every rank takes its part."""

    def __init__(self, batch: object, part: int) -> None:
        self.batch = batch
        self.part = part


def _one_each(
    group: list[Any], first: list[Any], spec: ShardSpec, rows: list[int | None] | list[int], units: int
) -> _Group:
    """Give each rank a batch as it is, and the first ones again to ranks that would get none."""
    held = tuple(1 if count is None else count for count in rows)
    if len(group) == spec.ranks:
        return _Group(group, StepCounts(held, held), units)
    if spec.split and spec.ranks > 1:
        raise DataError(
            f"A batch that does not tell how many samples it holds has no {spec.ranks} equal parts; got "
            f"{type(group[0]).__name__}. Use split_batches=False, or pass slice_fn_for_dispatch."
        )
    missing = spec.ranks - len(group)
    filled = group + list(itertools.islice(itertools.cycle(first), missing))
    spare = tuple(count_rows(batch) or 1 for batch in filled[len(group) :])
    return _Group(filled, StepCounts(held + spare, held + (0,) * missing), units)
