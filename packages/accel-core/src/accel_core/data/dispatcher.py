"""Loaders that one rank reads for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from accel_core.comm.batch import slice_tensors
from accel_core.data.loader import PreparedLoader
from accel_core.data.mesh import data_parts
from accel_core.data.rows import count_rows, join_rows, take_rows
from accel_core.data.shard import Cut, Tally
from accel_core.data.transfer import placed
from accel_core.data.wire import Wire
from accel_core.errors import DataError, RemoteRankError
from accel_core.process import world

__all__ = ["DataLoaderDispatcher"]

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
    """

    split_batches: bool = False
    slice_fn: Callable[..., Any] = staticmethod(slice_tensors)

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.slice_fn = slice_fn or slice_tensors
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.device = world.ensure().device
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    @property
    def parts(self) -> list[int]:
        """For each rank, which part of a global batch it gets."""
        here = world.ensure()
        return list(range(here.size)) if self.torch_device_mesh is None else data_parts(self.torch_device_mesh)

    @property
    def cut(self) -> Cut:
        """How the data is shared out over ranks."""
        parts = self.parts
        return Cut(
            ranks=max(parts) + 1,
            rank=parts[world.ensure().rank],
            batch_size=self._own_batch_size(),
            split=self.split_batches,
            drop_last=self._drop_last,
        )

    def state_dict(self) -> Any:
        """Return the state of the `StatefulDataLoader` on rank 0, which reads; the other ranks have none."""
        return super().state_dict() if world.ensure().is_main else {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Set the state on rank 0."""
        if world.ensure().is_main:
            super().load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield this rank's parts, on the device."""
        self._prologue()
        try:
            here = world.ensure()
            wire, advance = Wire(here), self.gradient_state._advance
            incoming = self._lead(wire) if here.is_main else self._follow(wire)
            for part, tally, last in incoming:
                self.tally = tally
                if last:
                    self.end_of_dataloader = True
                    self.remainder = tally.total if tally is not None else self.cut.step_samples or -1
                advance(self)
                yield next(placed(iter((part,)), self.device))
            self._complete()
        finally:
            self.end()

    def __len__(self) -> int:
        cut, batches = self.cut, super().__len__()
        if not cut.split:
            batches = batches // cut.ranks if cut.drop_last else -(-batches // cut.ranks)
        return max(0, batches - self.skip_batches * isinstance(self.dataset, IterableDataset))

    def own_skip(self) -> int:
        """Return how many of the loader's own batches the skipped steps hold."""
        return self.skip_batches * (1 if self.split_batches else self.cut.ranks)

    def _own_batches(self, offset: int) -> int:
        return offset // (self._own_batch_size() or 1)

    def _steps(self, offset: int) -> int | None:
        if isinstance(self.dataset, IterableDataset):
            return None
        cut = self.cut
        if cut.step_samples is None:
            return max(0, len(self) - offset // (1 if cut.split else cut.ranks))
        left = self.total_dataset_length - offset
        return max(0, left // cut.step_samples if cut.drop_last else -(-left // cut.step_samples))

    def _lead(self, wire: Wire) -> Iterator[tuple[Any, Tally | None, bool]]:
        """Read global batches, send each rank its part, and yield one's own."""
        parts = self.parts
        try:
            batches = self._global_batches(self._open())
            step = next(batches, _END)
        except Exception as failure:
            wire.send([None] + [_Failed(repr(failure))] * (len(parts) - 1))
            raise
        while step is not _END:
            state = self._own_state() if self.use_stateful_dataloader else None
            try:
                shares, tally = step
                following = next(batches, _END)
            except Exception as failure:
                wire.send([None] + [_Failed(repr(failure))] * (len(parts) - 1))
                raise
            if state is not None:
                self.__dict__["dl_state_dict"] = state
            last = following is _END
            messages = {part: (shares[part], tally, last) for part in set(parts)}
            wire.send([messages[part] for part in parts])
            yield self._own(shares[parts[0]]), tally, last
            step = following
        if step is _END and not self.end_of_dataloader:
            wire.send([None] * len(parts))

    def _follow(self, wire: Wire) -> Iterator[tuple[Any, Tally | None, bool]]:
        """Yield the parts that rank 0 sends."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._take_position(pending)
        last = False
        while not last:
            message = wire.receive()
            if message is None:
                return
            if isinstance(message, _Failed):
                raise RemoteRankError(
                    f"Rank 0 reads the data for all ranks, and reading failed there: {message.text}. Its own output "
                    "holds the traceback."
                )
            share, tally, last = message
            yield self._own(share), tally, last

    def _own(self, share: Any) -> Any:
        """Return this rank's part of what was sent: all of it, or what `slice_fn` takes out."""
        if not isinstance(share, _Whole):
            return share
        cut = self.cut
        mine = slice(cut.rank * share.part, (cut.rank + 1) * share.part)
        return self.slice_fn(share.batch, mine, process_index=cut.rank, num_processes=cut.ranks)

    def _global_batches(self, stream: Iterator[Any]) -> Iterator[tuple[list[Any], Tally | None]]:
        """Yield what all ranks read in one step: a part for each, and a tally where they are not full."""
        cut = self.cut
        first: Any = None
        while True:
            group = list(itertools.islice(stream, 1 if cut.split else cut.ranks))
            if not group:
                return
            rows = [count_rows(batch, cut.batch_size) for batch in group]
            known = [count for count in rows if count is not None]
            unbatched = self.batch_size is None and not isinstance(self.sampler, BatchSampler)
            if (unbatched and self.batch_sampler is None) or len(known) < len(rows):
                if len(group) < cut.ranks and cut.drop_last:
                    return
                first = first or group
                yield _one_each(group, first, cut, rows)
                continue
            full = len(group) * (cut.batch_size or max(known))
            short = len(group) < (1 if cut.split else cut.ranks) or sum(known) < full
            if short and cut.drop_last:
                return
            first = first if first is not None else group[0]
            if self.slice_fn is slice_tensors and not cut.split and not short:
                yield group, None
                continue
            yield self._cut_up(group, known, first, cut, short)

    def _cut_up(
        self, group: list[Any], rows: list[int], first: Any, cut: Cut, short: bool
    ) -> tuple[list[Any], Tally | None]:
        """Cut the rows of some batches in equal parts, filled up with the first rows of all."""
        total = sum(rows)
        part = -(-total // cut.ranks)
        whole = join_rows(group, rows) if len(group) > 1 else group[0]
        missing = part * cut.ranks - total
        if count_rows(whole, total) != total:
            return _one_each(group, [first], cut, rows)
        held = count_rows(first, cut.batch_size) or 0
        while missing > 0 and held:
            some = take_rows(first, slice(0, missing), held)
            whole = join_rows([whole, some], [part * cut.ranks - missing, min(missing, held)])
            missing -= min(missing, held)
        real = tuple(max(0, min(part, total - rank * part)) for rank in range(cut.ranks))
        tally = Tally((part,) * cut.ranks, real) if short or total % cut.ranks else None
        if self.slice_fn is not slice_tensors:
            return [_Whole(whole, part)] * cut.ranks, tally
        rows_now = part * cut.ranks
        shares = [take_rows(whole, slice(rank * part, (rank + 1) * part), rows_now) for rank in range(cut.ranks)]
        return shares, tally


class _Whole:
    """A global batch of which every rank takes its part."""

    def __init__(self, batch: Any, part: int) -> None:
        self.batch = batch
        self.part = part


class _Failed:
    """What rank 0 sends when it could not read."""

    def __init__(self, text: str) -> None:
        self.text = text


def _one_each(
    group: list[Any], first: list[Any], cut: Cut, rows: list[int | None] | list[int]
) -> tuple[list[Any], Tally | None]:
    """Give each rank a batch as it is, and the first ones again to ranks that would get none."""
    if len(group) == cut.ranks:
        return group, None
    if cut.split and cut.ranks > 1:
        raise DataError(
            f"A batch that does not tell how many samples it holds cannot be cut in {cut.ranks} parts; got "
            f"{type(group[0]).__name__}. Use split_batches=False, or pass slice_fn_for_dispatch."
        )
    missing = cut.ranks - len(group)
    filled = group + list(itertools.islice(itertools.cycle(first), missing))
    held = tuple(1 if count is None else count for count in rows)
    spare = tuple(count_rows(batch) or 1 for batch in filled[len(group) :])
    return filled, Tally(held + spare, held + (0,) * missing)
