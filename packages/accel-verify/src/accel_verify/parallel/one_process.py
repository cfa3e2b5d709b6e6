"""What makes one process train on what several ranks read: the oracle.

A prepared loader gives it the batches of all ranks as one, in the order of the ranks. Its schedule moves as far as
theirs. Where that is asked for, `num_processes` of its Accelerator answers with their number, because some scripts
scale rates and step counts by it; others divide losses by it, and need the truth. Batch normalization takes the
statistics of each rank's share, as ranks do; running statistics are those of the first one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data import RandomSampler as _RandomSampler

from accel_core.accelerator import Accelerator
from accel_core.data.loader import PreparedLoader
from accel_core.data.samplers import get_sampler
from accel_core.errors import DataError
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_verify.patch import replace, wrap


class _Joined(BatchSampler):
    """Gives as many batches at a time as there are ranks, as one."""

    def __init__(self, batches: Any, parts: int) -> None:
        self._batches, self._parts = batches, parts
        self.sampler = batches
        self.batch_size = parts * (getattr(batches, "batch_size", None) or 1)
        self.drop_last = bool(getattr(batches, "drop_last", False))

    def __iter__(self) -> Iterator[list[Any]]:
        joined: list[Any] = []
        for number, batch in enumerate(self._batches, 1):
            joined += batch
            if number % self._parts == 0:
                yield joined
                joined = []
        if joined and not self.drop_last:
            yield joined

    def __len__(self) -> int:
        full, rest = divmod(len(self._batches), self._parts)
        return full + (rest > 0 and not self.drop_last)


def read_for_all(parts: int, *, counts: bool = False) -> None:
    """Make the Accelerators of this process read and schedule for several ranks."""

    def prepared(
        prepare: Callable[..., object],
        accelerator: Accelerator,
        data_loader: DataLoader[Any],
        *args: object,
        **kwargs: object,
    ) -> object:
        if not isinstance(data_loader, PreparedLoader):  # a second prepare must not join again
            data_loader = _joined(accelerator, data_loader, parts)
        return prepare(accelerator, data_loader, *args, **kwargs)

    wrap(Accelerator, "prepare_data_loader", prepared)
    if parts == 1:
        return
    if counts:
        replace(Accelerator, "num_processes", property(lambda accelerator: parts))
    replace(AcceleratedScheduler, "_times", property(lambda scheduler: 1 if scheduler.split_batches else parts))
    wrap(_BatchNorm, "forward", functools.partial(_by_share, parts))


def _joined(accelerator: Accelerator, loader: DataLoader[Any], parts: int) -> DataLoader[Any]:
    """Return a loader that gives the batches of all ranks as one, and draws its order as ranks do."""
    loader = copy.copy(loader)
    _draw_order_as_ranks(accelerator, loader)
    if parts == 1 or accelerator.split_batches:  # a split batch is the global one already
        return loader
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "One process cannot read the batches of several ranks as one where the dataset makes them; got a loader "
            "with batch_size=None. Give the loader a batch size."
        )
    batches: Any = loader.batch_sampler
    plain = type(batches) is BatchSampler
    size = (loader.batch_size or 1) * parts
    joined = BatchSampler(batches.sampler, size, batches.drop_last) if plain else _Joined(batches, parts)
    # Torch forbids setting them.
    loader.__dict__.update(batch_sampler=joined, batch_size=size if plain else loader.batch_size)
    return loader


def _draw_order_as_ranks(accelerator: Accelerator, loader: DataLoader[Any]) -> None:
    """Give a random sampler a generator of its own with a seed drawn here, as ranks do that read one order."""
    sampler = get_sampler(loader)
    if isinstance(loader.dataset, IterableDataset) or getattr(sampler, "generator", False) is not None:
        return
    # Its order is that of all ranks already.
    if accelerator.use_seedable_sampler and isinstance(sampler, _RandomSampler):
        return
    sampler.generator = torch.Generator()
    sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def _by_share(parts: int, forward: Callable[..., Tensor], layer: _BatchNorm, input: Tensor) -> Tensor:
    """Normalize each rank's share of a batch by itself."""
    if not layer.training or len(input) < parts:  # a rank without rows has no statistics
        return forward(layer, input)
    outputs = []
    for number, share in enumerate(input.chunk(parts)):
        # Running statistics are those of the first rank, as in copies of a model.
        kept = [(each, each.clone()) for each in layer.buffers()] if number and layer.track_running_stats else []
        outputs.append(forward(layer, share))
        for buffer, before in kept:
            buffer.copy_(before)
    return torch.cat(outputs)
