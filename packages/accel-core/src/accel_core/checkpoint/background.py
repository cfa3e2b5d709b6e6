"""One save at a time, in a thread of its own, while training continues."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["Handle", "finish", "start"]


class Handle:
    """A save that is under way.

    The process does not exit before it is done. If it fails and nobody asks, the process ends with a report on standard
    error and status 1.
    """

    def __init__(self, work: Callable[[], object], target: Path) -> None:
        self.target = target
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="accel-checkpoint", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its folder.

        Raises:
            CheckpointError: Writing failed on some rank.
            TimeoutError: The save is still under way.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The save of {str(self.target)!r} is still under way after {timeout} s. Wait longer, or without a "
                "limit."
            )
        error, self._error = self._error, None  # once: `finish` must not raise it again
        if error is not None:
            raise error
        return self.target

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error


class _LastStatus:
    """Ends the process with status 1 when the interpreter deletes it, after everything else has ended."""

    # Bound as a default: when this runs, the names of the module may be gone.
    def __del__(self, leave: Callable[[int], None] = os._exit) -> None:
        leave(1)


_in_flight: Handle | None = None
_watching = False


def start(work: Callable[[], object], target: Path) -> Handle:
    """Start the save in the background; `finish` must have been called for the one before."""
    global _in_flight, _watching
    if not _watching:
        _watching = True
        _watch_the_end()
    _in_flight = Handle(work, target)
    return _in_flight


def finish() -> None:
    """Wait for the save in flight, if there is one, and raise its error unless `wait` raised it before."""
    global _in_flight
    handle, _in_flight = _in_flight, None  # first, as `wait` may raise
    if handle is not None:
        handle.wait()


def _watch_the_end() -> None:
    """Have `_report_failure` called when this process ends; every process that is forked from it does so for itself."""
    if multiprocessing.parent_process() is None:
        atexit.register(_end_process)
        # Before atexit, Python ends all pools of threads, and a save to a store needs some.
        with contextlib.suppress(RuntimeError):  # this process is past that
            threading._register_atexit(_wait)  # type: ignore[attr-defined]
    else:
        # A process of multiprocessing ends without atexit, after its finalizers; the lowest priority is called last.
        multiprocessing.util.Finalize(None, _end_child, exitpriority=-1000)
    os.register_at_fork(after_in_child=_forget)


def _wait() -> None:
    if _in_flight is not None:
        _in_flight._thread.join()


def _forget() -> None:
    global _in_flight, _watching
    _in_flight, _watching = None, False


def _end_process() -> None:
    """Report, and let the status be 1: atexit cannot set it, and leaving here would skip what others registered."""
    if _report_failure():
        _flush_open_files()
        # The attributes of sys go after those of every other module.
        sys._accel_last_status = _LastStatus()  # type: ignore[attr-defined]


def _flush_open_files() -> None:
    """Write out what files hold back: one that is closed by the interpreter only might be closed too late."""
    for item in gc.get_objects():
        if issubclass(type(item), io.IOBase):
            with contextlib.suppress(OSError, ValueError):
                item.flush()


def _end_child() -> None:
    if _report_failure():
        # Not every file: what its parent holds back for one is in a forked process too, and would be written twice.
        sys.stdout.flush()
        os._exit(1)


def _report_failure() -> bool:
    """Wait for the save in flight; if it failed and nobody was told, tell standard error."""
    target = _in_flight.target if _in_flight is not None else None
    try:
        finish()
    except BaseException as error:
        sys.stderr.write(
            f"accel: the save of {str(target)!r} in the background failed, and the script ended without checking its "
            f"result. The process exits with status 1.\n{type(error).__name__}: {error}\n"
        )
        sys.stderr.flush()
        return True
    return False
