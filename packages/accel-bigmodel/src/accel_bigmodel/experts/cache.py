"""A cache of offloaded experts: the ones that a mixture chose, on the device that computes with them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from accel_bigmodel.device_map.experts import refuse_small_cache
from accel_bigmodel.experts.source import Brought, ExpertSource
from accel_bigmodel.memory import used_here
from accel_core._records import record
from accel_core.modules.sizes import convert_file_size_to_int

Weights = dict[str, torch.Tensor]
Key = tuple[str, int]
"""The name of a module of experts, and the number of one of them."""


@record
class ExpertReport:
    """What a model's expert cache did.

    Attributes:
        budget: Bytes that the cache may hold.
        held: Bytes that it holds now.
        in_pages: Those of them that are pages of files: the CPU computes with the page cache's memory.
        hits: How often a chosen expert was in the cache, or on its way there.
        misses: How often one had to be read.
        from_disk: Bytes that were read from files.
        from_host: Bytes that were copied from the CPU's memory.
        guessed: How often an expert was guessed that was chosen then.
        guessed_wrong: How often one was guessed that was not.
        tokens: Tokens that went through each module of experts, by the module's name.
        chosen: How often each expert was chosen by some token of a forward, by the module's name and its number.
        experts: How many experts each module has.
    """

    budget: int
    held: int
    in_pages: int
    hits: int
    misses: int
    from_disk: int
    from_host: int
    guessed: int
    guessed_wrong: int
    tokens: Counter[str]
    chosen: dict[str, Counter[int]]
    experts: dict[str, int]

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
    brought: Brought
    nbytes: int


Guess = tuple[ExpertSource, Sequence[int]] | None
"""Experts that the next module of them will probably need."""


class ExpertCache:
    """Holds weights of experts within a budget of bytes, for all modules of a model; the least recently used go first.

    An expert that a forward asks for is there until the next one is asked for. While one computes, the next missing
    ones, and then those that were guessed, are read by a thread, as far as the budget has room for them. One for which
    there is none is read when its turn comes, and not kept.

    Args:
        budget: Bytes.
        least: Bytes of the largest expert, below which no budget may be.
    """

    def __init__(self, budget: int, least: int = 0) -> None:
        self.budget = budget
        self.least = least
        self._lock = threading.RLock()  # futures call back on the thread that cancels them
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._used = 0
        self._reserved = 0  # bytes of experts that are being read
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._chosen: dict[str, Counter[int]] = {}
        self._experts: dict[str, int] = {}
        self._coming: dict[Key, Future[None]] = {}
        self._guesses: dict[tuple[int, str], frozenset[int]] = {}  # by thread and module
        self._worker: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave contents and counts out of copies and pickles."""
        return {"budget": self.budget, "least": self.least}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin empty."""
        self.__init__(**state)  # type: ignore[misc]

    def resize(self, size: int | str) -> None:
        """Change the budget, also while the model runs; experts beyond it go now.

        Args:
            size: Bytes or a written size.

        Raises:
            ConfigurationError: There is no room for one expert; nothing was changed.
        """
        budget = convert_file_size_to_int(size)
        refuse_small_cache(size, budget, self.least)
        with self._lock:
            self.budget = budget
            self._evict(0, ())

    def report(self) -> ExpertReport:
        """Return what the cache did since the model was dispatched."""
        with self._lock:
            return ExpertReport(
                self.budget,
                self._used,
                sum(entry.nbytes for entry in self._entries.values() if entry.brought.in_pages),
                self._counts["hits"],
                self._counts["misses"],
                self._counts["disk"],
                self._counts["host"],
                self._counts["right"],
                self._counts["wrong"],
                Counter(self._tokens),
                {name: Counter(numbers) for name, numbers in self._chosen.items()},
                dict(self._experts),
            )

    def bring(
        self,
        source: ExpertSource,
        numbers: Sequence[int],
        tokens: int,
        *,
        present_first: bool = False,
        guess: Callable[[], Guess] | None = None,
    ) -> Iterator[tuple[int, Weights]]:
        """Yield experts' numbers and weights.

        Args:
            source: Where they come from.
            numbers: The experts, each once and in the order of the file.
            tokens: How many tokens chose them, for the report.
            present_first: Whether those in the cache come first, so that they compute while others are read.
            guess: Called when the reading of these has begun: what the next module will probably need.
        """
        name, state, nbytes = source.name, source.state(), source.nbytes
        with self._lock:
            self._tokens[name] += tokens
            self._experts[name] = source.count
            self._chosen.setdefault(name, Counter()).update(numbers)
            self._judge(name, numbers)
            absent = [number for number in numbers if not self._touch((name, number), state)]
            missing = deque(number for number in absent if (name, number) not in self._coming)
            self._counts["hits"] += len(numbers) - len(missing)
            self._counts["misses"] += len(missing)
        needed = {(name, number) for number in numbers}
        for number in sorted(numbers, key=lambda each: each in absent) if present_first else numbers:
            while missing and self._send_for(source, missing[0], state, needed):
                missing.popleft()
            if guess is not None:
                self._send_ahead(guess(), needed)
                guess = None
            entry = self.look_up((name, number), state)
            kept = entry is not None
            if entry is None:  # there was no room for it, or another thread needed its room
                entry = _Entry(state, self._read(source, number), nbytes)
                kept = self._keep((name, number), entry, needed)
            if missing and missing[0] == number:
                missing.popleft()
            needed.discard((name, number))
            for weight in entry.brought.weights.values():
                used_here(weight)  # loaded by a thread of its own, or for an earlier forward
            yield number, entry.brought.weights
            if not kept:
                entry.brought.release()

    def _judge(self, name: str, numbers: Sequence[int]) -> None:
        """Compare what was chosen with what was guessed; experts that were not chosen need not come any more."""
        guessed = self._guesses.pop((threading.get_ident(), name), frozenset())
        self._counts["right"] += len(guessed.intersection(numbers))
        self._counts["wrong"] += len(guessed.difference(numbers))
        for number in guessed.difference(numbers):
            if (coming := self._coming.get((name, number))) is not None:
                coming.cancel()

    def _send_ahead(self, guess: Guess, busy: Collection[Key]) -> None:
        """Begin to read experts that were guessed, as far as those that are needed now leave room."""
        if guess is None:
            return
        source, numbers = guess
        name, state = source.name, source.state()
        self._guesses[threading.get_ident(), name] = frozenset(numbers)
        kept = {*busy, *((name, number) for number in numbers)}
        for number in numbers:
            if not self._send_for(source, number, state, kept):
                return

    def _send_for(self, source: ExpertSource, number: int, state: tuple[object, ...], kept: Collection[Key]) -> bool:
        """Begin to read an expert that is not there, and return whether there is room for it beside others."""
        key, nbytes = (source.name, number), source.nbytes
        with self._lock:
            if self._touch(key, state) or key in self._coming:
                return True
            if not self._evict(nbytes, kept):
                return False
            if not source.waits:  # a thread would take longer
                self._put(key, _Entry(state, self._read(source, number), nbytes))
                return True
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="accel-experts")
            self._reserved += nbytes
            coming = self._coming[key] = self._worker.submit(self._fetch, source, number, state)
        coming.add_done_callback(lambda done: self._arrived(key, nbytes, done))
        return True

    def _fetch(self, source: ExpertSource, number: int, state: tuple[object, ...]) -> None:
        # If it fails, it fails again for the forward that needs it.
        entry = _Entry(state, self._read(source, number), source.nbytes)
        with self._lock:  # in one step: counted as used and as reserved, it would push out another expert
            self._put((source.name, number), entry)
            self._reserved -= entry.nbytes

    def _arrived(self, key: Key, nbytes: int, coming: Future[None]) -> None:
        """Forget an expert that was on its way, and give back the room of one that failed or was called off."""
        with self._lock:
            if coming.cancelled() or coming.exception():
                self._reserved -= nbytes
            del self._coming[key]
            if not self._coming and self._worker is not None:
                self._worker.shutdown(wait=False)
                self._worker = None

    def look_up(self, key: Key, state: tuple[object, ...]) -> _Entry | None:
        """Return an expert that is in the cache, or that was on its way there."""
        with self._lock:
            coming = self._coming.get(key)
        if coming is not None:
            wait([coming])
        with self._lock:
            return self._entries[key] if self._touch(key, state) else None

    def _touch(self, key: Key, state: tuple[object, ...]) -> bool:
        """Count an entry as used now, and return whether it is there and still right."""
        entry = self._entries.get(key)
        # By identity, which entries keep alive: tensors are compared by their values otherwise.
        if entry is not None and any(a is not b for a, b in zip(entry.state, state, strict=True)):
            self._drop(key)
            return False
        if entry is not None:
            self._entries.move_to_end(key)
        return entry is not None

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._used -= entry.nbytes
        entry.brought.release()

    def _put(self, key: Key, entry: _Entry) -> None:
        if key in self._entries:
            self._drop(key)
        self._entries[key] = entry
        self._used += entry.nbytes

    def _evict(self, nbytes: int, needed: Collection[Key]) -> bool:
        """Let go of what was used longest ago until so many bytes are free; what is needed stays."""
        for key in [key for key in self._entries if key not in needed]:
            if self._used + self._reserved + nbytes <= self.budget:
                break
            self._drop(key)
        return self._used + self._reserved + nbytes <= self.budget

    def _keep(self, key: Key, entry: _Entry, needed: Collection[Key]) -> bool:
        """Keep an expert that was read, unless all the room is for others that this forward needs."""
        with self._lock:
            if key in self._entries or not self._evict(entry.nbytes, needed):
                return False
            self._put(key, entry)
            return True

    def _read(self, source: ExpertSource, number: int) -> Brought:
        brought = source.read(number)
        with self._lock:
            self._counts["disk"] += brought.from_disk
            self._counts["host"] += brought.from_host
        return brought
