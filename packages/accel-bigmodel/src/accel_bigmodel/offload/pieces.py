"""Weights files that stay in a store: ranges come into memory, or through files of a cache on this machine."""

import itertools
import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accel_bigmodel.offload.index import Map
from accel_core._records import record
from accel_core.checkpoint.remote.download import StoredFile
from accel_core.checkpoint.remote.store import PARALLEL, PART
from accel_core.errors import AccelError, OffloadError

__all__ = ["Away", "PieceCache", "away", "put_away"]

_ALIGNMENT = 64


@record
class _Run:
    first: int
    last: int
    content: bytearray | None = None


class Away:
    """The bytes of a file in a store; without a cache they come into new memory, those that lie together at once."""

    def __init__(self, file: StoredFile, cache: "PieceCache | None" = None) -> None:
        self.file, self.size, self.cache = file, file.size, cache
        self.room = None if cache is None else cache.budget
        self._runs: dict[tuple[int, int], _Run] = {}

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Note ranges that will be asked for, each once."""
        run = _Run(0, 0)
        for first, last in sorted(ranges):
            if first != run.last or last - run.first > PARALLEL * PART:
                run = _Run(first, last)
            run.last = last
            self._runs[first, last] = run

    def mapped(self, first: int, last: int) -> tuple[Any, int]:
        """Return memory, and where a range begins in it."""
        if self.cache is not None:
            return self.cache.bring(self.file, first, last), 0
        run = self._runs.pop((first, last), None) or _Run(first, last)
        begin = run.first - run.first % _ALIGNMENT  # so that values are aligned as in the file
        if run.content is None:
            content = bytearray(run.last - begin)
            view = memoryview(content)[run.first - begin :]
            self.file.read(run.first, run.last, lambda at, part: view.__setitem__(slice(at, at + len(part)), part))
            run.content = content
        return run.content, first - begin

    def will_need(self, first: int, last: int) -> None:
        """Have a range fetched into the cache while something else computes."""
        if self.cache is not None:
            self.cache.send_for(self.file, first, last)


_away: dict[str, Away] = {}


def put_away(path: str | os.PathLike[str], bytes_of: Away) -> None:
    """Note where the bytes of a file are, of which its header alone lies under its path."""
    _away[os.path.realpath(path)] = bytes_of


def away(path: str | os.PathLike[str]) -> Away | None:
    """Return where the bytes of a file are; None for one that is here."""
    return _away.get(os.path.realpath(path))


@record
class _Piece:
    path: Path
    nbytes: int
    awaited: bool  # whether it was sent for, and not used yet
    coming: Future[None]
    users: int = 0  # threads that wait for it
    memory: "weakref.ReferenceType[Any] | None" = None

    @property
    def is_idle(self) -> bool:
        return self.coming.done() and not self.users and (self.memory is None or self.memory() is None)


class PieceCache:
    """Ranges of files in a store, each a file of a folder, within a budget of bytes.

    Where room is missing, that goes which will be used last, judging by when it was used before: of blocks that run in
    turn, the one that just ran. What computes stays, beyond the budget if that is more: it would keep its room on the
    disk, deleted or not.
    """

    def __init__(self, folder: Path, budget: int | None) -> None:
        self.folder, self.budget = folder, budget
        self._uses: dict[tuple[str, int, int], tuple[int, int]] = {}  # the last and the one before, of all ever used
        self._clock = itertools.count()
        self._pieces: dict[tuple[str, int, int], _Piece] = {}
        self._begin()
        _caches.add(self)

    def _begin(self) -> None:
        """Begin without threads, and without what they had to fetch."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead = 0  # pieces that it has to fetch
        self._pieces = {key: piece for key, piece in self._pieces.items() if piece.coming.done()}
        for piece in self._pieces.values():
            piece.users = 0
        self.held = sum(piece.nbytes for piece in self._pieces.values())

    def bring(self, file: StoredFile, first: int, last: int) -> Any:
        """Return a range as mapped memory, which stays what it is for as long as it is used.

        Raises:
            CheckpointError: The store fails for good, or the file is gone or another one.
            OffloadError: The folder cannot be written.
        """
        key = file.name, first, last
        while True:
            with self._lock:
                begins = key not in self._pieces
                piece = self._begun(key, needed=True)
                assert piece is not None
                piece.users += 1
                now = next(self._clock)
                self._uses[key] = now, self._uses.get(key, (now, now))[0]
            try:
                if begins:
                    self._fetch(file, first, piece)
                piece.coming.result()
                with self._lock:
                    return _memory_of(piece)
            except BaseException as failure:
                with self._lock:
                    self._drop(key, piece)
                # What was fetched ahead or by another thread is tried again here.
                if begins or not isinstance(failure, Exception):
                    raise
            finally:
                with self._lock:
                    piece.users, piece.awaited = piece.users - 1, False
                    self._make_room(0, needed=True)  # of what computed at once, beyond the budget, and is idle now

    def send_for(self, file: StoredFile, first: int, last: int) -> None:
        """Begin to fetch a range, if there is room beside what computes and what was sent for before."""
        key = file.name, first, last
        with self._lock:
            begins = key not in self._pieces
            piece = self._begun(key, needed=False)
            if piece is None:
                return
            piece.awaited = True
            if begins:
                self._pool = self._pool or ThreadPoolExecutor(PARALLEL, thread_name_prefix="accel-store")
                try:
                    self._pool.submit(self._fetch_ahead, file, first, piece)
                except RuntimeError as failure:  # no thread can be started: who needs the piece fetches it
                    piece.coming.set_exception(failure)
                    self._drop(key, piece)
                    return
                self._ahead += 1

    def _fetch_ahead(self, file: StoredFile, first: int, piece: _Piece) -> None:
        self._fetch(file, first, piece)
        with self._lock:
            self._ahead -= 1
            if not self._ahead and self._pool is not None:  # no thread waits for work that may never come
                self._pool.shutdown(wait=False)
                self._pool = None

    def _begun(self, key: tuple[str, int, int], *, needed: bool) -> _Piece | None:
        """Return a piece, a new one if there is room for it or it is needed."""
        nbytes = key[2] - key[1]
        if key not in self._pieces:
            if not self._make_room(nbytes, needed=needed) and not needed:
                return None
            self._pieces[key] = _Piece(
                self.folder / f"piece-{os.getpid()}-{next(self._clock)}", nbytes, False, Future()
            )
            self.held += nbytes
        return self._pieces[key]

    def _fetch(self, file: StoredFile, first: int, piece: _Piece) -> None:
        try:
            with open(piece.path, "xb", buffering=0) as target:
                file.read(first, first + piece.nbytes, lambda at, part: _write(target.fileno(), part, at))
            piece.coming.set_result(None)
        except BaseException as failure:  # who waits for the piece raises it
            piece.path.unlink(missing_ok=True)
            piece.coming.set_exception(self._named(failure))

    def _named(self, failure: BaseException) -> BaseException:
        if isinstance(failure, AccelError) or not isinstance(failure, OSError):
            return failure
        return OffloadError(
            f"Weights from a store cannot be kept on this machine; got {failure} in {str(self.folder)!r}. Choose an "
            "`offload_folder` that can be written and has room, or a smaller `offload_cache`."
        )

    def _drop(self, key: tuple[str, int, int], piece: _Piece) -> None:
        if self._pieces.get(key) is piece:
            del self._pieces[key]
            self.held -= piece.nbytes
            piece.path.unlink(missing_ok=True)

    def _make_room(self, nbytes: int, *, needed: bool) -> bool:
        """Let pieces go until so many bytes are free, and return whether they are; only what is needed takes all."""
        if self.budget is None or self.held + nbytes <= self.budget:
            return True
        idle = {key: each for key, each in self._pieces.items() if each.is_idle and (needed or not each.awaited)}
        if not needed and self.held - sum(each.nbytes for each in idle.values()) + nbytes > self.budget:
            return False
        now = next(self._clock)

        def rank(key: tuple[str, int, int]) -> tuple[bool, int]:
            latest, before = self._uses.get(key, (now, now))
            return idle[key].awaited, -abs(2 * latest - before - now)  # how far its next use is, or is overdue

        for key in sorted(idle, key=rank):
            if self.held + nbytes <= self.budget:
                break
            self._drop(key, idle[key])
        return self.held + nbytes <= self.budget


_caches: "weakref.WeakSet[PieceCache]" = weakref.WeakSet()


def _begin_again() -> None:
    for cache in _caches:
        cache._begin()


os.register_at_fork(after_in_child=_begin_again)  # a forked process has no threads


def _memory_of(piece: _Piece) -> Any:
    found = None if piece.memory is None else piece.memory()
    if found is None:
        with open(piece.path, "rb") as file:
            found = Map(file.fileno(), piece.nbytes).buffer
        piece.memory = weakref.ref(found)
    return found


def _write(descriptor: int, part: bytes, at: int) -> None:
    view = memoryview(part)
    while len(view):
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
