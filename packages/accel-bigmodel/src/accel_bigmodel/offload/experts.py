"""A cache of offloaded experts: the ones that a mixture chose, on the device that computes with them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from accel_core._records import record

__all__ = ["ExpertCache", "ExpertReport", "ExpertSource"]

Weights = dict[str, torch.Tensor]
Key = tuple[str, int]
"""The name of a module of experts, and the number of one of them."""


class ExpertSource(Protocol):
    """Where the weights of one module's experts come from."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of one expert on its device."""

    def read(self, number: int) -> tuple[Weights, int, int]:
        """Return the weights of an expert on its device, and how many bytes came from disk and from host memory.

        Args:
            number: Which expert of the module.
        """

    def state(self) -> tuple[object, ...]:
        """Return objects that are the same ones as long as weights that were read would be read again."""


@record
class ExpertReport:
    """What a model's expert cache did.

    Attributes:
        budget: Bytes that the cache may hold.
        held: Bytes that it holds now.
        hits: How often a chosen expert was in the cache.
        misses: How often one had to be read.
        from_disk: Bytes that were read from files.
        from_host: Bytes that were copied from the CPU's memory.
        tokens: Tokens that went through each module of experts, by the module's name.
        chosen: How often each expert was chosen, by the module's name and the expert's number.
    """

    budget: int
    held: int
    hits: int
    misses: int
    from_disk: int
    from_host: int
    tokens: Counter[str]
    chosen: dict[str, Counter[int]]

    @property
    def hit_rate(self) -> float:
        """The share of chosen experts that were in the cache; NaN before the first forward."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else float("nan")

    def bytes_per_token(self) -> float:
        """Return how many bytes of experts a token that went through all layers cost to bring; NaN before any."""
        passed = max(self.tokens.values(), default=0)
        return (self.from_disk + self.from_host) / passed if passed else float("nan")


@record
class _Entry:
    state: tuple[object, ...]
    weights: Weights
    nbytes: int


class ExpertCache:
    """Holds weights of experts within a budget of bytes, for all modules of a model; the least recently used go first.

    An expert that a forward asks for is there until the next one is asked for. While one computes, the next missing
    ones are read by a thread, as far as the budget has room for them; at least one is, so that a forward which needs
    more than the budget holds at most one expert beyond it.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._used = 0
        self._reserved = 0  # bytes of experts that are being read
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._chosen: dict[str, Counter[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave contents and counts out of copies and pickles."""
        return {"budget": self.budget}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin empty."""
        self.budget = state["budget"]
        self._begin()

    def report(self) -> ExpertReport:
        """Return what the cache did since the model was dispatched."""
        with self._lock:
            counts = self._counts
            return ExpertReport(
                self.budget,
                self._used,
                counts["hits"],
                counts["misses"],
                counts["disk"],
                counts["host"],
                Counter(self._tokens),
                {name: Counter(numbers) for name, numbers in self._chosen.items()},
            )

    def bring(self, source: ExpertSource, numbers: Sequence[int], tokens: int) -> Iterator[Weights]:
        """Yield the weights of experts, in the order of their numbers.

        Args:
            source: Where they come from.
            numbers: The experts, each once and in the order of the file.
            tokens: How many tokens chose them, for the report.
        """
        name, state, nbytes = source.name, source.state(), source.nbytes
        with self._lock:
            self._tokens[name] += tokens
            self._chosen.setdefault(name, Counter()).update(numbers)
            missing = deque(number for number in numbers if not self._touch((name, number), state))
            self._counts["hits"] += len(numbers) - len(missing)
            self._counts["misses"] += len(missing)
        needed = {(name, number) for number in numbers}
        reading: dict[int, Future[Weights]] = {}
        # A thread of this forward's own starts with the first read, if there is any, and ends with the forward.
        reader = ThreadPoolExecutor(1, thread_name_prefix="accel-experts")
        try:
            for number in numbers:
                while missing and self._reserve(nbytes, needed, forced=not reading):
                    following = missing.popleft()
                    reading[following] = reader.submit(self._read, source, following)
                found = reading.pop(number, None)
                entry = None if found is not None else self._look_up((name, number))
                if found is not None:
                    try:
                        weights = found.result()
                    finally:
                        self._free(nbytes)
                    self._keep((name, number), _Entry(state, weights, nbytes), needed)
                else:
                    # An entry that was there is gone if another thread needed its room.
                    weights = self._read(source, number) if entry is None else entry.weights
                needed.discard((name, number))
                yield weights
        finally:
            reader.shutdown(cancel_futures=True)
            self._free(len(reading) * nbytes)

    def _touch(self, key: Key, state: tuple[object, ...]) -> bool:
        """Count an entry as used now, and return whether it is there and still right."""
        entry = self._entries.get(key)
        # By identity, which entries keep alive: tensors are compared by their values otherwise.
        if entry is not None and any(a is not b for a, b in zip(entry.state, state, strict=True)):
            self._used -= self._entries.pop(key).nbytes
            return False
        if entry is not None:
            self._entries.move_to_end(key)
        return entry is not None

    def _look_up(self, key: Key) -> _Entry | None:
        with self._lock:
            return self._entries.get(key)

    def _reserve(self, nbytes: int, needed: Collection[Key], *, forced: bool) -> bool:
        """Make room for an expert that is to be read, and return whether there is any."""
        with self._lock:
            if not self._evict(nbytes, needed) and not forced:
                return False
            self._reserved += nbytes
            return True

    def _evict(self, nbytes: int, needed: Collection[Key]) -> bool:
        """Let go of what was used longest ago until so many bytes are free; what is needed stays."""
        for key in [key for key in self._entries if key not in needed]:
            if self._used + self._reserved + nbytes <= self.budget:
                break
            self._used -= self._entries.pop(key).nbytes
        return self._used + self._reserved + nbytes <= self.budget

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

    def _keep(self, key: Key, entry: _Entry, needed: Collection[Key]) -> None:
        """Keep an expert that was read, unless all the room is for others that this forward needs."""
        with self._lock:
            if key not in self._entries and self._evict(entry.nbytes, needed):
                self._entries[key] = entry
                self._used += entry.nbytes

    def _read(self, source: ExpertSource, number: int) -> Weights:
        weights, from_disk, from_host = source.read(number)
        with self._lock:
            self._counts["disk"] += from_disk
            self._counts["host"] += from_host
        return weights
