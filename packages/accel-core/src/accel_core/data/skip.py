"""Loaders that leave out the first batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_core.data.loader import PreparedLoader
from accel_core.data.samplers import Around
from accel_core.data.settings import LoaderSettings

_LoaderT = TypeVar("_LoaderT", bound="DataLoader[Any]")


class SkipBatchSampler(Around):
    """A batch sampler without its first batches; none of their samples is read."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SkipDataLoader(PreparedLoader):
    """A loader that reads its first batches and lets them go: what a stream without positions needs."""

    def __init__(
        self, dataset: object, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: object
    ) -> None:
        self.settings = LoaderSettings(skip_batches=skip_batches)
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    def _read(self) -> Iterator[Any]:
        """Return an iterator over the batches after the first ones."""
        self.forget_position()
        stream = self._raw()
        # Of map-style data the indices are passed over already, so nothing that is skipped is read.
        return itertools.islice(stream, self.skip_batches, None) if self._draws_itself() else stream

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches * self._draws_itself())


def skip_first_batches(dataloader: _LoaderT, num_batches: int = 0) -> _LoaderT:
    """Return a loader that gives what `dataloader` gives, without its first batches.

    Counted are this rank's batches from the start of the epoch, whatever position `dataloader` stands at: a position
    loaded into it is given up. Indices are skipped; their samples are not read, except from an iterable
    dataset. When the returned loader comes to its end, the epoch of `dataloader` is over as well.

    Args:
        dataloader: A loader, prepared or not; it keeps giving whole epochs.
        num_batches: Number of batches to leave out.

    Returns:
        A loader of the same kind.

    Examples:
        >>> rest = skip_first_batches(loader, 3)
        >>> len(loader), len(rest)
        (4, 1)
    """
    if isinstance(dataloader, PreparedLoader):
        settings = dataclasses.replace(dataloader.settings, skip_batches=dataloader.skip_batches + num_batches)
        skipping = dataloader.adopt(dataloader, settings=settings)
        skipping._origin = dataloader
        replay = dataloader.pending
        dataloader.pending = None
        dataloader.forget_position()
        # What is left of a loaded position is the order of its epoch.
        skipping.pending = None if replay is None else {**replay, "offset": 0, "steps": 0}
        return cast("_LoaderT", skipping)
    if isinstance(dataloader.dataset, IterableDataset):
        return cast("_LoaderT", SkipDataLoader.adopt(dataloader, settings=LoaderSettings(skip_batches=num_batches)))
    loader = object.__new__(type(dataloader))
    loader.__dict__.update(dataloader.__dict__)
    which = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    kept = SkipBatchSampler(getattr(dataloader, which), skip_batches=num_batches)
    loader.__dict__.update({"_iterator": None, which: kept})  # whose workers read indices of the other loader
    return loader
