"""The local record of a run: one file of JSON lines that holds every value until its trackers have it.

A line is a mapping with a `kind`:

    run     the file's head: `version`, `run_id`, `project`, `trackers`, `started`, `host`, `pid`
    config  the configuration: `seq`, `values`
    log     values at a step: `seq`, `step`, `time`, `values`, `kwargs`, `only` (trackers, or null for all)
    call    another call of one tracker: `seq`, `only`, `method`, `args`, `kwargs`
    sent    a tracker has the entries `seq`: `tracker`, `seq`
    state   the run that a tracker has opened: `tracker`, `state`
    failed  a tracker raised: `tracker`, `seq`, `error`
    resumed the run goes on with an earlier one: `run_id`
    end     the run ended

Entries are written before a tracker is called and marked `sent` after, so a killed run loses none; an entry whose mark
was lost is sent twice. Values are in the notation of `accel_core.tracking.codec`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from accel_core._records import record
from accel_core.errors import TrackerError
from accel_core.tracking import codec

__all__ = ["FORMAT_VERSION", "SUFFIX", "SpoolFile", "SpoolWriter", "find", "read"]

FORMAT_VERSION = 1
"""Version of the notation, in the head of every file."""

SUFFIX = ".spool.jsonl"
"""End of the names of spool files."""

_ENTRIES = frozenset({"config", "log", "call"})


class SpoolWriter:
    """Appends lines to one spool file; safe from several threads.

    Args:
        path: The file; its folder is made.

    Raises:
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._file = open(path, "a", encoding="ascii")  # noqa: SIM115 - closed by `close`

    def write(self, line: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system.

        Raises:
            OSError: The disk is full or gone.
        """
        text = json.dumps(line, separators=(",", ":")) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(text)
                self._file.flush()

    def close(self, keep: bool) -> None:
        """Close the file, and remove it with the files that belong to it unless it is kept."""
        with self._lock:
            self._file.close()
        if keep:
            return
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    @property
    def files(self) -> Path:
        """Folder for copies of files that are logged."""
        return self.path.with_name(self.path.name.removesuffix(SUFFIX) + ".files")


@record
class SpoolFile:
    """What a spool file holds.

    Attributes:
        path: The file.
        run_id: The run that wrote it.
        project: Name given to `init_trackers`.
        trackers: Names of the run's trackers.
        started: When, in seconds since 1970.
        host: Name of the machine.
        pid: Number of the process.
        ended: Whether the run came to its end.
        entries: Lines that go to trackers, with decoded values, in order.
        sent: By tracker, the numbers of the entries that it has.
        errors: By tracker, the last error that it raised.
        states: By tracker, what it stored of the run that it opened.
    """

    path: Path
    run_id: str
    project: str
    trackers: list[str]
    started: float
    host: str = ""
    pid: int = 0
    ended: bool = False
    entries: list[dict[str, Any]] = field(default_factory=list)
    sent: dict[str, set[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def unsent(self, tracker: str) -> list[dict[str, Any]]:
        """Return the entries for a tracker that it does not have, in order."""
        have = self.sent.get(tracker, set())
        return [
            entry
            for entry in self.entries
            if entry["seq"] not in have and (entry.get("only") is None or tracker in entry["only"])
        ]


def find(place: Path) -> list[Path]:
    """Return the spool files at a path, oldest first.

    Args:
        place: A spool file, or a folder that is searched with everything below it.
    """
    if place.is_file():
        return [place]
    return sorted(place.rglob(f"*{SUFFIX}"), key=lambda path: (path.stat().st_mtime, path.name))


def read(path: Path) -> SpoolFile:
    """Read a spool file.

    A last line that was cut off by the end of the process is left out.

    Raises:
        TrackerError: The file is not a spool file, of a later version, or damaged in its middle.
    """
    with open(path, encoding="utf-8") as lines:
        parsed = list(_parse(path, lines))
    head = parsed[0] if parsed else {}
    if head.get("kind") != "run" or head.get("version") != FORMAT_VERSION:
        raise TrackerError(
            f"{path} is not a spool file of version {FORMAT_VERSION}; its first line is of kind {head.get('kind')!r}, "
            f"version {head.get('version')!r}. Name a file that ends in {SUFFIX}, or update accel-core."
        )
    found = SpoolFile(
        path,
        head["run_id"],
        head["project"],
        list(head["trackers"]),
        head["started"],
        head.get("host", ""),
        head.get("pid", 0),
    )
    for line in parsed[1:]:
        kind = line["kind"]
        if kind in _ENTRIES:
            found.entries.append({key: codec.decode(item) for key, item in line.items()})
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
    return found


def _parse(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and "kind" in line:
            yield line
        elif text.endswith("\n"):
            raise TrackerError(
                f"{path} is damaged; line {number} is {text[:40]!r}, not a spool entry. Remove that line and try again."
            )
