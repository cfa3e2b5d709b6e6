"""Holds a traceback back until it is known whether its process ends because of it.

Where it does, the report of the failure shows one traceback, that of the cause, instead of every rank showing its own.
Where the process goes on, the traceback is passed on.
"""

import contextlib
import re
import time
from pathlib import Path

TRACEBACK = b"Traceback (most recent call last)"

_BEGINS = re.compile(rb"^(\[rank\d+\]: ?)?" + re.escape(TRACEBACK), re.MULTILINE)
"""A rank's mark stands before the lines that torch's `sys.excepthook` prints: for uncaught exceptions."""

_HOLD_S = 2.0
"""Seconds that a process has to end after a traceback that may have been caught and logged.

Nothing outside of a process shows that its interpreter is about to end, so time decides. It is counted without the time
in which the process waited for a core: how long an interpreter takes to end does not depend on the load otherwise.
"""

_UNCAUGHT_HOLD_S = 60.0
"""The same after an uncaught exception. The process is ending; one that hangs while it does must show why."""


class TracebackHold:
    """What is held back of one stream, from a traceback on."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._seconds = 0.0
        self._since = 0.0
        self._waited = 0.0

    def __len__(self) -> int:
        """Return how many bytes are held back."""
        return len(self._held)

    def add(self, chunk: bytes, pid: int) -> bytes:
        """Hold back a piece of the stream from a traceback on, and return what comes before it."""
        found = list(_BEGINS.finditer(chunk))
        uncaught = any(begins[1] for begins in found)
        keeps_all = self._seconds == float("inf")
        if not keeps_all and (uncaught or (found and not self._held)):
            self._seconds = _UNCAUGHT_HOLD_S if uncaught else _HOLD_S
            self._since, self._waited = time.monotonic(), seconds_without_core(pid)
        # Order is kept: nothing overtakes what is held.
        start = 0 if self._held or keeps_all else found[0].start() if found else len(chunk)
        self._held += chunk[start:]
        return chunk[:start]

    def keep_all(self) -> None:
        """Hold back all that follows, for as long as the process runs."""
        self._seconds = float("inf")

    def remaining(self, pid: int) -> float:
        """Return the seconds of its own that a process still has to end; not above 0 once the traceback is due."""
        passed = time.monotonic() - self._since
        return self._seconds - (passed - (seconds_without_core(pid) - self._waited))

    def take(self) -> bytes:
        """Return what is held back, and clear it."""
        held = bytes(self._held)
        self._held.clear()
        return held


def seconds_without_core(pid: int) -> float:
    """Return how long the main thread of a process was ready to run while others had the cores."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9  # the kernel counts nanoseconds
    return 0.0
