"""The indices that a loader reads, from the position that it has to begin at."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler

from accel_core.data.samplers import BatchSamplerShard, batches_from
from accel_core.data.shard import Cut

__all__ = ["Indices", "Positioning"]

_END: Any = object()


class Positioning(Protocol):
    """A loader that says where its indices begin.

    Attributes:
        batch_sampler (Any): Batches of indices, or `None`.
        sampler (Any): Single indices, where there are no batches.
        begins_at (int): Global offset that the iteration begins at.
        skip_batches (int): Batches left out at the start of every iteration.
        replays (bool): Whether the order is being drawn once more, as it was drawn before.
    """

    batch_sampler: Any
    sampler: Any
    begins_at: int
    skip_batches: int
    replays: bool

    @property
    def cut(self) -> Cut:
        """How the data is shared out over ranks."""

    def own_skip(self) -> int:
        """Return how many of the loader's own batches are left out at the start."""


class Indices:
    """The indices that a loader reads, from the position that it has to begin at.

    torch keeps this object for as long as persistent workers live, so it asks the loader anew at every iteration.
    """

    def __init__(self, loader: Positioning) -> None:
        self._loader = weakref.ref(loader)
        self.latest: Iterator[Any] = iter(())

    @property
    def loader(self) -> Positioning:
        """The loader; whoever reads these indices holds it."""
        loader = self._loader()
        assert loader is not None, "a loader that is being read is held by its reader"
        return loader

    def _base(self) -> Any:
        return self.loader.batch_sampler if self.loader.batch_sampler is not None else self.loader.sampler

    def __iter__(self) -> Iterator[Any]:
        loader, base = self.loader, self._base()
        offset = loader.begins_at
        indices = self._from(base, offset) if offset else iter(base)
        if loader.skip_batches and not offset:
            indices = itertools.islice(indices, loader.own_skip(), None)
        if not loader.replays:
            return indices
        self.latest = indices
        return Primed(self)

    def _from(self, base: Any, offset: int) -> Iterator[Any]:
        """Skip to a position, at the first `next`: torch asks for this iterator twice and draws its seed in between."""
        if isinstance(base, BatchSamplerShard):
            base.begin_at(offset)
            yield from base
        elif self.loader.cut.batch_size is None or not isinstance(base, BatchSampler):
            yield from itertools.islice(iter(base), offset, None)
        else:
            yield from batches_from(base, offset, 0)[0]

    def prime(self) -> None:
        """Draw the first index now, and with it the order of the epoch."""
        first = next(self.latest, _END)
        if first is not _END:
            self.latest = itertools.chain([first], self.latest)

    def __len__(self) -> int:
        return max(0, len(self._base()) - self.loader.own_skip())


class Primed:
    """Read the latest indices of `Indices`, so that they can be primed after torch asked for them."""

    def __init__(self, indices: Indices) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.indices.latest)
