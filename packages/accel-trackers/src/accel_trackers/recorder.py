"""The recorder of a run: a spool file, and the thread that writes it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from accel_core.tracking.worker import TrackerWorker
from accel_trackers.codec import encode
from accel_trackers.spool import ENTRIES, FORMAT_VERSION, SUFFIX, SpoolWriter, files_of, make_own
from accel_trackers.takeover import Left, left_behind

__all__ = ["SpoolRecorder"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class SpoolRecorder:
    """Writes what a run logs to a spool file; found by accel-core under the entry-point group `accel.recorders`.

    Only its own thread touches the disk, so a disk that hangs blocks nothing else. While lines cannot be written, what
    is logged goes to the trackers alone, and lines are written again as soon as the disk takes them.

    Attributes:
        path: The file, once it is open.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        self.path: Path | None = None
        self._folder = folder.absolute()
        self._spool: SpoolWriter | None = None
        self._trackers = list(run["trackers"])
        self._left: list[Left] = []
        self._unwritten: set[int] = set()
        self._reported = False
        self._late = False
        self._worker = TrackerWorker("tracker-spool")
        self._worker.put(lambda: self._open(run))  # the caller must not wait for the disk

    def _open(self, run: Mapping[str, Any]) -> None:
        slug = re.sub(r"[^\w.-]+", "-", run["project"]).strip("-.") or "run"  # a project may hold path separators
        stem = f"{slug[:60]}-{run['run_id']}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        facts = {"version": FORMAT_VERSION, "started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        try:
            make_own(self._folder)
            for number in range(1, 1000):
                # Machines may share a disk, and their processes a number.
                name = stem if number == 1 else f"{stem}-{number}"
                try:
                    self._spool = SpoolWriter(self._folder / f"{name}{SUFFIX}", new=True)
                    break
                except FileExistsError:
                    # The folder's name may be a file: then every number seems to exist.
                    if not self._folder.is_dir():
                        raise
            if self._spool is not None:
                self._spool.write({"kind": "run", **run, **facts})
                self.path = self._spool.path
        except OSError as error:
            spool, self._spool, self._reported = self._spool, None, True
            # Every reader refuses a file without its head.
            if spool is not None:
                spool.path.unlink(missing_ok=True)
            logger.warning(
                "No spool file can be written in %s (%s); values that a tracker fails to store are lost. Choose a "
                "folder with TrackerKwargs(spool_dir=...).",
                self._folder,
                error,
            )

    def write(self, line: Mapping[str, Any]) -> None:
        """Queue a line."""
        if line["kind"] in ENTRIES:
            # Before the line is queued: when `put` returns, the thread may have written it and removed it.
            self._unwritten.add(line["seq"])
        if not self._worker.put(lambda: self._write(line)):
            self._report("its disk is too slow: the queue of what is to be written is full")

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._spool is None:
            return
        try:
            self._spool.write({key: encode(value) for key, value in line.items()})
        except OSError as error:
            self._report(str(error))
            return
        if line["kind"] in ENTRIES:
            self._unwritten.discard(line["seq"])  # it is on disk now
        # Only if every line was written: otherwise the earlier files may hold the only copy of their entries.
        elif line["kind"] == "resumed" and not self._reported:
            for left in self._left:
                SpoolWriter(left.path).close(keep=False)  # their entries are in this file now
            self._left = []

    def _report(self, why: str) -> None:
        """Warn once that lines are not written."""
        if not self._reported:
            self._reported = True
            logger.warning(
                "The spool file %s cannot be written (%s); what a tracker fails to store meanwhile is lost. Free the "
                "disk, or choose another folder with TrackerKwargs(spool_dir=...).",
                self.path,
                why,
            )

    def take_over(self, run_id: str, step: int, seconds: float) -> list[Mapping[str, Any]]:
        """Return what killed processes of a run had not sent; their files go when the line `resumed` is written."""
        try:
            found = self._called(lambda: self._find_left(run_id, step), seconds)
        except OSError as error:
            logger.warning("What earlier processes left in %s cannot be read (%s).", self._folder, error)
            found = None
        self._left = found or []
        return [entry for left in self._left for entry in left.entries]

    def _find_left(self, run_id: str, step: int) -> list[Left]:
        return [] if self._spool is None else left_behind(self._spool.path, run_id, step, self._trackers)

    def _called(self, work: Callable[[], _T], seconds: float) -> _T | None:
        """Do work in the thread that touches the disk, and return its result; `None` if that takes too long."""
        done, results = threading.Event(), list[_T | OSError]()

        def call() -> None:
            try:
                results.append(work())
            except OSError as error:
                results.append(error)
            done.set()

        # After one call that timed out, later calls do not wait for the same disk again.
        stuck = self._late and not self._worker.drain(0)
        if stuck or not self._worker.put(call) or not done.wait(seconds):
            self._late = True
            return None
        if isinstance(results[0], OSError):
            raise results[0]
        return results[0]

    def keep_file(self, path: str, seconds: float) -> str:
        """Copy a file or folder into the spool's own folder, under the same name.

        Raises:
            OSError: It does not exist or cannot be copied, or not within `seconds`.
        """
        source = Path(path).absolute()
        copy = self._called(lambda: self._copied(source), seconds)
        if copy is None:
            raise TimeoutError(
                f"{path} could not be copied to the spool within {seconds:g} s; leave it where it is until the run "
                "ended, or give the disk more time with TrackerKwargs(drain_seconds=...)"
            )
        return copy

    def _copied(self, source: Path) -> str:
        if self._spool is None:
            return str(source)
        folder = files_of(self._spool.path)
        folder.mkdir(parents=True, exist_ok=True)
        # A folder for each, because files of one name may be logged again and again.
        place = Path(tempfile.mkdtemp(prefix="artifact-", dir=folder))
        try:
            if source.is_dir():
                shutil.copytree(source, place / source.name)
            else:
                shutil.copy2(source, place / source.name)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return str(place / source.name)

    def drain(self, seconds: float) -> bool:
        """Wait at most `seconds` until every line is written, and return whether all are."""
        return self._worker.drain(seconds)

    def close(self, unsent: Mapping[str, frozenset[int]], *, keep: bool, seconds: float, quiet: bool) -> None:
        """Close the file after what is queued, and remove it unless it is kept or holds what a tracker did not take.

        A disk that does not take the rest within `seconds` is left to the thread, which ends with the process.
        """
        self._worker.finish(lambda: self._close(keep or bool(unsent)))
        if self._worker.drain(seconds):
            self._worker.close(0.0)
        lost = {name: len(numbers & self._unwritten) for name, numbers in unsent.items()}  # neither sent nor on disk
        kept = {name: len(numbers) - lost[name] for name, numbers in unsent.items()}
        if any(kept.values()) and not quiet:
            logger.warning(
                "Entries that trackers failed to store (%s) are in %s. Send them with `accel trackers replay %s`.",
                *(_counted(kept), self.path, self.path),
            )
        if any(lost.values()) and not quiet:
            logger.warning(
                "Entries that trackers failed to store are lost (%s); the spool %s could not be written. Choose a disk "
                "with room for it with TrackerKwargs(spool_dir=...).",
                *(_counted(lost), self.path or f"in {self._folder}"),
            )

    def _close(self, keep: bool) -> None:
        if self._spool is None:
            return
        try:
            self._spool.close(keep)
        except OSError as error:
            # A network disk may report only now that an earlier write failed.
            self._report(str(error))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
