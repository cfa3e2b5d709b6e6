"""A cache of offloaded experts: the ones that a mixture chose, on the device that computes with them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch

from accel_bigmodel.device_map.experts import refuse_small_cache
from accel_bigmodel.memory import used_here
from accel_bigmodel.offload.heat import draw_heat
from accel_core._records import record
from accel_core.modules.sizes import convert_file_size_to_int, written_size

__all__ = ["Brought", "ExpertCache", "ExpertReport", "ExpertSource", "call_all"]

Weights = dict[str, torch.Tensor]
Key = tuple[str, int]
"""The name of a module of experts, and the number of one of them."""


@record
class Brought:
    """The weights of an expert on the device that computes with it, and what it took to have them there."""

    weights: Weights
    from_disk: int = 0
    from_host: int = 0
    in_pages: bool = False  # whether the weights are the file's own pages, not copies of them
    release: Callable[[], None] | None = None  # lets pages go


def call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Call each."""
    for call in calls:
        call()


class ExpertSource(Protocol):
    """Where the weights of one module's experts come from."""

    name: str
    count: int
    """How many experts the module has."""

    @property
    def waits(self) -> bool:
        """Whether `read` waits until the weights are there; otherwise it asks for them, and computing waits."""

    @property
    def nbytes(self) -> int:
        """Bytes of one expert on its device."""

    def read(self, number: int) -> Brought:
        """Return the weights of an expert on its device.

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

    def svg(self) -> str:
        """Draw how often each expert was chosen, a row for each module, as an SVG document."""
        rows = {name: (self.experts[name], self.chosen[name]) for name in self.chosen}
        found = f"{self.hits} of {self.hits + self.misses} were found in a cache of {written_size(self.budget)}"
        guessed = f"; {self.guessed} guesses were right, {self.guessed_wrong} wrong" if self.guessed else ""
        return draw_heat(f"How often each expert was chosen; {found}{guessed}", rows)


@record
class _Entry:
    state: tuple[object, ...]
    brought: Brought
    nbytes: int

    def release(self) -> None:
        """Let pages go."""
        if self.brought.release is not None:
            self.brought.release()


Guess = tuple[ExpertSource, Sequence[int]] | None
"""Experts that the next module of them will probably need."""


class _Directly(Executor):
    """Runs calls that do not wait at once: a thread would take longer."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except BaseException as failure:
            done.set_exception(failure)
        return done


def _reader(source: ExpertSource, name: str) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix=name) if source.waits else _Directly()


class ExpertCache:
    """Holds weights of experts within a budget of bytes, for all modules of a model; the least recently used go first.

    An expert that a forward asks for is there until the next one is asked for. While one computes, the next missing
    ones are read by a thread, as far as the budget has room for them; at least one is, so that a forward which needs
    more than the budget holds at most one expert beyond it.

    Args:
        budget: Bytes.
        least: Bytes of the largest expert, below which no budget may be.
    """

    def __init__(self, budget: int, least: int = 0) -> None:
        self.budget = budget
        self.least = least
        self._begin()
        _caches.add(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()  # futures call back on the thread that cancels them
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._used = 0
        self._reserved = 0  # bytes of experts that are being read
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._chosen: dict[str, Counter[int]] = {}
        self._experts: dict[str, int] = {}
        self._ahead: dict[Key, Future[None]] = {}
        self._guesses: dict[tuple[int, str], frozenset[int]] = {}  # by thread and module
        self._worker: Executor | None = None

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
            counts = self._counts
            return ExpertReport(
                self.budget,
                self._used,
                sum(entry.nbytes for entry in self._entries.values() if entry.brought.in_pages),
                counts["hits"],
                counts["misses"],
                counts["disk"],
                counts["host"],
                counts["right"],
                counts["wrong"],
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
            missing = deque(number for number in absent if (name, number) not in self._ahead)
            self._counts["hits"] += len(numbers) - len(missing)
            self._counts["misses"] += len(missing)
        needed = {(name, number) for number in numbers}
        reading: dict[int, Future[Brought]] = {}
        # A thread of this forward's own starts with the first read, if there is any, and ends with the forward.
        reader = _reader(source, "accel-experts")
        try:
            for number in sorted(numbers, key=lambda each: each in absent) if present_first else numbers:
                while missing and self._reserve(nbytes, needed, forced=not reading):
                    following = missing.popleft()
                    reading[following] = reader.submit(self._read, source, following)
                if guess is not None:
                    self._send_ahead(guess(), needed)
                    guess = None
                entry = self.look_up((name, number), state) if number not in reading else None
                if entry is None:
                    # An entry that was there is gone if another thread needed its room.
                    entry = _Entry(state, self._taken(source, number, reading), nbytes)
                    kept = self._keep((name, number), entry, needed)
                else:
                    kept = True
                needed.discard((name, number))
                for weight in entry.brought.weights.values():
                    used_here(weight)  # loaded by a thread of its own, or for an earlier forward
                yield number, entry.brought.weights
                if not kept:
                    entry.release()
        finally:
            reader.shutdown(cancel_futures=True)
            self._free(len(reading) * nbytes)

    def _taken(self, source: ExpertSource, number: int, reading: dict[int, Future[Brought]]) -> Brought:
        """Return an expert that is being read, or read it now."""
        found = reading.pop(number, None)
        if found is None:
            return self._read(source, number)
        try:
            return found.result()
        finally:
            self._free(source.nbytes)

    def _judge(self, name: str, numbers: Sequence[int]) -> None:
        """Compare what was chosen with what was guessed; experts that were not chosen need not come any more."""
        guessed = self._guesses.pop((threading.get_ident(), name), frozenset())
        self._counts["right"] += len(guessed.intersection(numbers))
        self._counts["wrong"] += len(guessed.difference(numbers))
        for number in guessed.difference(numbers):
            coming = self._ahead.get((name, number))
            if coming is not None and coming.cancel():
                del self._ahead[name, number]

    def _send_ahead(self, guess: Guess, busy: Collection[Key]) -> None:
        """Begin to read experts that were guessed, as far as those that are needed now leave room."""
        if guess is None:
            return
        source, numbers = guess
        name, state, nbytes = source.name, source.state(), source.nbytes
        kept = {*busy, *((name, number) for number in numbers)}
        with self._lock:
            if self._worker is None:
                self._worker = _reader(source, "accel-guessed")
            self._guesses[threading.get_ident(), name] = frozenset(numbers)
            for number in numbers:
                key = name, number
                if self._touch(key, state) or key in self._ahead:
                    continue
                if not self._evict(nbytes, kept):
                    break
                self._reserved += nbytes
                coming = self._worker.submit(self._fetch, source, number, state)
                if not coming.done():
                    self._ahead[key] = coming
                coming.add_done_callback(lambda _: self._free(nbytes))

    def _fetch(self, source: ExpertSource, number: int, state: tuple[object, ...]) -> None:
        key = source.name, number
        try:
            # If it fails, it fails again for the forward that needs it.
            entry = _Entry(state, self._read(source, number), source.nbytes)
            with self._lock:
                self._put(key, entry)  # its room is reserved
        finally:
            with self._lock:
                self._ahead.pop(key, None)

    def look_up(self, key: Key, state: tuple[object, ...]) -> _Entry | None:
        """Return an expert that is in the cache, or that was on its way there."""
        with self._lock:
            coming = self._ahead.get(key)
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
        entry.release()

    def _put(self, key: Key, entry: _Entry) -> None:
        if key in self._entries:
            self._drop(key)
        self._entries[key] = entry
        self._used += entry.nbytes

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
            self._drop(key)
        return self._used + self._reserved + nbytes <= self.budget

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

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


_caches: weakref.WeakSet[ExpertCache] = weakref.WeakSet()


def _begin_again() -> None:
    """Begin empty in a forked process: it has none of the threads that were reading."""
    for cache in _caches:
        cache._begin()


os.register_at_fork(after_in_child=_begin_again)
