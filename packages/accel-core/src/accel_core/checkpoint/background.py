"""One save at a time, in a thread of its own, while training continues."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path


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


_in_flight: Handle | None = None
_watched_by = 0
"""The process whose end waits for the save in flight; one that is forked from it begins anew."""


def start(work: Callable[[], object], target: Path) -> Handle:
    """Start the save in the background; `finish` must have been called for the one before."""
    global _in_flight, _watched_by
    if _watched_by != os.getpid():
        _watched_by = os.getpid()
        # The end of multiprocessing comes late: at the end of the script after what others registered, and in a
        # process of its own, which ends without atexit, after all finalizers of a higher priority.
        multiprocessing.util.Finalize(None, _end, exitpriority=-1000)
        # Before it, Python ends all pools of threads, and a save to a store needs some.
        with contextlib.suppress(RuntimeError):  # this process is past that
            threading._register_atexit(_wait)  # type: ignore[attr-defined]
    _in_flight = Handle(work, target)
    return _in_flight


def finish() -> None:
    """Wait for the save in flight, if there is one, and raise its error unless `wait` raised it before."""
    global _in_flight
    handle, _in_flight = _in_flight, None  # first, as `wait` may raise
    if handle is not None:
        handle.wait()


def _wait() -> None:
    if _in_flight is not None:
        _in_flight._thread.join()


def _end() -> None:
    """Wait for the save in flight; print a failure that no call has raised, and exit with status 1."""
    target = _in_flight.target if _in_flight is not None else None
    try:
        finish()
    except BaseException as error:
        sys.stderr.write(
            f"accel: the save of {str(target)!r} in the background failed, and the script ended without checking its "
            f"result. The process exits with status 1.\n{type(error).__name__}: {error}\n"
        )
        # Of a forked process not every file: what its parent holds back for one is in it too.
        forked = multiprocessing.parent_process() is not None
        for item in [sys.stdout, sys.stderr] if forked else gc.get_objects():
            if issubclass(type(item), io.IOBase):
                with contextlib.suppress(OSError, ValueError):
                    item.flush()
        os._exit(1)
