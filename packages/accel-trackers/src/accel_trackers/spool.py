"""The local record of a run: one file of JSON lines that holds every value until its trackers have it.

A line is a mapping with a `kind`:

    run     the file's head: `version`, `run_id`, `project`, `trackers`, `started`, `host`, `pid`
    config  the configuration: `seq`, `values`
    log     values at a step: `seq`, `step`, `filled`, `time`, `values`, `kwargs`, `only` (trackers, or null for all)
    call    another call of one tracker: `seq`, `only`, `method`, `args`, `kwargs`
    sent    a tracker has the entries `seq`: `tracker`, `seq`
    state   the run that a tracker has opened: `tracker`, `state`
    failed  a tracker raised: `tracker`, `seq`, `error`
    resumed the run goes on with an earlier one: `run_id`
    end     the run ended

An entry is marked `sent` after a tracker took it, so an entry whose mark was lost is sent twice. Values are in the
notation of `accel_trackers.codec`. What is read is checked line by line: a file can name logging methods and no others.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Any

from accel_core._records import record
from accel_core.errors import TrackerError
from accel_core.tracking.handle import QUEUED
from accel_trackers import codec

__all__ = ["ENTRIES", "FORMAT_VERSION", "SUFFIX", "SpoolFile", "SpoolWriter", "files_of", "find", "make_own", "read"]

ENTRIES = frozenset({"config", "log", "call"})
"""Kinds of the lines that go to trackers."""

FORMAT_VERSION = 1
"""Version of the notation, in the head of every file."""

SUFFIX = ".spool.jsonl"
"""Suffix of spool files."""

_BLOCK = 1 << 16
_LARGEST = 2**63
_YEAR_10000 = 253_402_300_800  # Python's dates end there

Line = dict[str, Any]


class SpoolWriter:
    """Appends lines to one spool file; safe from several threads."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        # Unbuffered, so that what a full disk refused is not written again when the file is closed.
        # In append mode: after a cut, a position of its own would leave a hole before the next line.
        self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0), 0o666)
        self._size = self._repaired()

    def _repaired(self) -> int:
        """Complete or cut off a last line that a killed process left unfinished, and return the file's size."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        tail = b""
        while b"\n" not in tail and len(tail) < size:  # from the end: a spool may be large
            begin = max(0, size - len(tail) - _BLOCK)
            tail = os.pread(self._file, size - len(tail) - begin, begin) + tail
        last = tail.rpartition(b"\n")[2]
        if not last:
            return size
        try:
            json.loads(last)
        except ValueError:
            os.ftruncate(self._file, size - len(last))
            return size - len(last)
        return size + os.write(self._file, b"\n")  # the line is whole, only its end was lost

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line and hand it to the operating system, or leave the file as it is."""
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode("ascii")
        with self._lock:
            if self._file is None:
                return
            try:
                written = 0
                while written < len(data):  # a signal or a full disk may end a write early
                    written += os.write(self._file, data[written:])
            except OSError:
                # Half a line would make the next one unreadable, so it is cut; a disk that allows neither is given up.
                try:
                    os.ftruncate(self._file, self._size)
                except OSError:
                    self._release()
                raise
            self._size += len(data)

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def close(self, keep: bool) -> None:
        """Close the file, and remove it with the files that belong to it unless it is kept."""
        with self._lock:
            self._release()
        if keep:
            return
        self.path.unlink(missing_ok=True)
        shutil.rmtree(files_of(self.path), ignore_errors=True)  # many runs have none
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # if it is empty


def make_own(folder: Path) -> None:
    """Create the part of a path that lies in a world-writable folder, for this user only.

    Raises:
        OSError: That part belongs to another user, who could read and change what is written there.
    """
    if not hasattr(os, "getuid"):  # Windows has no such folders
        return
    for above, place in pairwise((*reversed(folder.parents), folder)):
        if not above.is_dir():
            return
        if above.stat().st_mode & stat.S_IWOTH == 0:
            continue
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        owner = place.lstat().st_uid
        if owner not in (0, os.getuid()):  # lstat: a link of another user is refused too
            raise PermissionError(errno.EPERM, f"{place} belongs to user {owner}")


def files_of(path: Path) -> Path:
    """Return the folder that holds a spool file's copies of logged files."""
    return path.with_name(path.name.removesuffix(SUFFIX) + ".files")


@record
class SpoolFile:
    """What a spool file holds."""

    path: Path  # the file
    run_id: str  # the run that wrote it
    project: str  # name given to `init_trackers`
    trackers: list[str]  # names of the run's trackers
    started: float  # when, in seconds since 1970
    host: str = ""  # name of the machine
    pid: int = 0  # number of the process
    ended: bool = False  # whether the run came to its end
    entries: list[Line] = field(default_factory=list)  # lines that go to trackers, with decoded values, in order
    sent: dict[str, set[int]] = field(default_factory=dict)  # by tracker, the numbers of the entries that it has
    errors: dict[str, str] = field(default_factory=dict)  # by tracker, the last error that it raised
    states: dict[str, Line] = field(default_factory=dict)  # by tracker, what it stored of the run that it opened

    @property
    def is_written(self) -> bool:
        """Whether another process of this machine, which is still alive, writes the file."""
        # A process id means nothing on another machine.
        if self.ended or self.host != socket.gethostname() or self.pid == os.getpid():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        # The process exists, and belongs to another user.
        except PermissionError:
            pass
        return True

    def unsent(self, tracker: str) -> list[Line]:
        """Return the entries for a tracker that it does not have, in order."""
        have = self.sent.get(tracker, set())
        return [
            entry
            for entry in self.entries
            if entry["seq"] not in have and (entry["only"] is None or tracker in entry["only"])
        ]


def find(place: Path) -> list[Path]:
    """Return the spool files at a path, oldest first."""
    if not place.is_dir():  # a file that is named is read, whatever its name
        return [place]
    return sorted(place.rglob(f"*{SUFFIX}"), key=lambda path: (_changed(path), path.name))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # a broken link, which `read` refuses by name


def read(path: Path) -> SpoolFile:
    """Read a spool file.

    A last line that was cut off by the end of the process is left out.

    Raises:
        TrackerError: The file cannot be read, is not a spool file, of a later version, or damaged in its middle.
    """
    lines = _parse(path, _content(path))
    number, head = next(lines, (0, {}))
    if head.get("kind") != "run" or head.get("version") != FORMAT_VERSION:
        raise TrackerError(
            f"{path} is not a spool file of version {FORMAT_VERSION}; its first line is of kind "
            f"{_short(head.get('kind'))}, version {_short(head.get('version'))}. Name a file that ends in {SUFFIX}, or "
            "update accel-trackers."
        )
    _check(path, number, head)
    found = SpoolFile(
        path,
        head["run_id"],
        head["project"],
        head["trackers"],
        head["started"],
        head["host"],
        head["pid"],
    )
    for number, line in lines:
        _check(path, number, line)
        _take(found, line)
    return found


def _take(found: SpoolFile, line: Line) -> None:
    kind = line["kind"]
    if kind in ENTRIES:
        found.entries.append(line)
    elif kind == "sent":
        found.sent.setdefault(line["tracker"], set()).update(line["seq"])
    elif kind == "state":
        found.states[line["tracker"]] = line["state"]
    elif kind == "failed":
        found.errors[line["tracker"]] = line["error"]
    elif kind == "resumed":
        found.run_id = line["run_id"]
    elif kind == "end":
        found.ended = True


def _content(path: Path) -> bytes:
    try:
        # A pipe of that name would block the reader forever, so the file is opened without waiting and checked first.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise TrackerError(f"{path} is not a file; got a folder, pipe or device. Name a file of {SUFFIX}.")
            with open(file, "rb", closefd=False) as opened:
                return opened.read()
        finally:
            os.close(file)
    except OSError as error:
        raise TrackerError(
            f"{path} cannot be read; the system says {error.strerror or error}. Name a file that you may read."
        ) from error


def _parse(path: Path, content: bytes) -> Iterator[tuple[int, Line]]:
    """Yield every line with its number, decoded; the values of a line of an unknown kind stay as they are."""
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        line = _decoded(text)
        if isinstance(line, dict):
            yield number, line
        elif text.endswith(b"\n"):  # without it, the process ended while it wrote
            raise _damaged(path, number, f"{line}: {_short(text)}")


def _decoded(text: bytes) -> Line | str:
    """Return a line as a mapping with a kind, or what is wrong with it."""
    try:
        line = json.loads(text.decode("ascii"))
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            return "it is not a mapping with a kind"
        return {key: codec.decode(item) for key, item in line.items()} if line["kind"] in _FIELDS else line
    except (RecursionError, ValueError) as error:
        return str(error)


def _damaged(path: Path, number: int, what: str) -> TrackerError:
    return TrackerError(f"{path} is damaged; line {number} is not a spool entry: {what}. Remove that line.")


def _short(value: object) -> str:
    text = codec.describe(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _check(path: Path, number: int, line: Line) -> None:
    """Refuse a line that lacks a field, or has one of the wrong type."""
    for name, (wanted, fits) in _FIELDS.get(line["kind"], {}).items():
        if name not in line or not fits(line[name]):
            found = f"got {_short(line[name])}" if name in line else "it is not there"
            raise _damaged(path, number, f"its {name!r} is {wanted}; {found}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_step(value: object) -> bool:
    return type(value) is int and -_LARGEST <= value < _LARGEST


def _is_named(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_Field = tuple[str, Callable[[Any], bool]]
_TEXT: _Field = ("a text", _is_text)
_COUNT: _Field = ("a whole number", _is_count)
_NAMED: _Field = ("a mapping with names", _is_named)
_ENTRY: dict[str, _Field] = {
    "seq": _COUNT,
    "only": ("a list of trackers or null", lambda value: value is None or _is_texts(value)),
}
_FIELDS: dict[str, dict[str, _Field]] = {
    "run": {
        "run_id": _TEXT,
        "project": _TEXT,
        "trackers": ("a list of names", _is_texts),
        "started": (
            "a time in seconds",
            lambda value: type(value) in (int, float) and math.isfinite(value) and 0 <= value < _YEAR_10000,
        ),
        "host": _TEXT,
        "pid": ("a process number", lambda value: type(value) is int and 0 <= value < 2**31),
    },
    "config": {**_ENTRY, "values": ("a mapping", lambda value: isinstance(value, dict))},
    "log": {
        **_ENTRY,
        "values": ("a mapping", lambda value: isinstance(value, dict)),
        "step": ("a whole number or null", lambda value: value is None or _is_step(value)),
        "filled": ("a whole number", _is_step),
        "kwargs": (
            "a mapping of each tracker's arguments",
            lambda value: _is_named(value) and all(_is_named(item) for item in value.values()),
        ),
    },
    "call": {
        **_ENTRY,
        "method": ("one of " + ", ".join(sorted(QUEUED)), lambda value: _is_text(value) and value in QUEUED),
        "args": ("a list", lambda value: isinstance(value, list | tuple)),
        "kwargs": _NAMED,
    },
    "sent": {
        "tracker": _TEXT,
        "seq": ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_is_count, value))),
    },
    "state": {"tracker": _TEXT, "state": _NAMED},
    "failed": {"tracker": _TEXT, "error": _TEXT},
    "resumed": {"run_id": _TEXT},
    "end": {},
}
