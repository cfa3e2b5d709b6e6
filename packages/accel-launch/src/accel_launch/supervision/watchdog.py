"""Ends a run in which nothing happens any more, and shows where every process stood.

Progress is a line of output, or of errors such as a progress bar's, from any rank. Python prints the stacks of all
threads when it gets SIGABRT while `faulthandler` is on, so the processes need nothing but `PYTHONFAULTHANDLER=1` in
their environment (https://docs.python.org/3/library/faulthandler.html).
"""

import signal
import threading
import time
from collections.abc import Callable, Collection

from accel_launch.supervision.guard import end_group
from accel_launch.supervision.streams import RankLog

__all__ = ["VARIABLES", "Watchdog"]

VARIABLES = {"PYTHONFAULTHANDLER": "1"}
"""What the processes need in their environment."""

_PRINTING = 2.0


class Watchdog:
    """Watches the ranks of one machine.

    Args:
        seconds: How long no rank may make progress.
        ranks: Returns the records of the ranks that run.
        on_bite: Called once, from the watching thread, before the processes are ended.
    """

    def __init__(self, seconds: float, ranks: Callable[[], Collection[RankLog]], on_bite: Callable[[], None]) -> None:
        self._seconds = seconds
        self._ranks = ranks
        self._on_bite = on_bite
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="accel-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._seconds / 8)):
            running = [log for log in self._ranks() if log.pid and log.ended_at is None]
            if not running:
                continue
            silent = time.monotonic() - max(log.heard_at for log in running)
            if silent < self._seconds:
                continue
            self._on_bite()
            for number, patience in ((signal.SIGABRT, _PRINTING), (signal.SIGKILL, 0.0)):
                for log in running:
                    if log.ended_at is None:
                        end_group(log.pid, number)
                self._done.wait(patience)
            return
