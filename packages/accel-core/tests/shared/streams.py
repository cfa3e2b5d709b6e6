"""A stream of numbers and an order for loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from torch.utils.data import IterableDataset, Sampler, get_worker_info


class Stream(IterableDataset[int]):
    """The numbers from `first` on; with `parted`, each worker reads its own of them."""

    def __init__(self, length: int, first: int = 0, *, parted: bool = False) -> None:
        self.length, self.first, self.parted = length, first, parted

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info() if self.parted else None
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(self.first + begin, self.first + self.length, step))


class Pythonic(Sampler[int]):
    """An order that is drawn from Python's generator, as soon as it is asked for an iterator."""

    def __init__(self, data: Sequence[int]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        order = list(self.data)
        random.shuffle(order)
        return iter(order)
