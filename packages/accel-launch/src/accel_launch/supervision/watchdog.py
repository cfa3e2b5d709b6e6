"""Ends a run that hangs, and shows where every process was.

What counts as progress depends on what a rank shows. While it reads a prepared loader, batches and optimizer steps
count (`accel_core.host.heartbeat`), from its second batch on; before and after, and for a script that does not use
accel, a line of output, or of errors such as a progress bar's, counts as well. Python prints the stacks of all threads
when it gets SIGABRT while `faulthandler` is on, so the processes need nothing but variables in their environment
(https://docs.python.org/3/library/faulthandler.html).
"""

import signal
import threading
import time
from collections.abc import Callable, Collection

from accel_core.host import heartbeat
from accel_launch.supervision.orphans import signal_group
from accel_launch.supervision.streams import RankLog
from accel_launch.terminal import say

_PRINTING, _LOOK = 10.0, 0.05
_SETTLED = 2
"""Batches and steps after which a rank has been through its first step, which may compile for long."""


def progressed_at(heard_at: float, progress: heartbeat.Progress | None) -> float:
    """Return when a rank last made progress."""
    if progress is None or (progress.beats == 0 and progress.loops == 0):
        return heard_at
    if progress.loops and progress.beats > _SETTLED:
        return progress.at
    return max(heard_at, progress.at)


class Watchdog:
    """Watches the ranks of one machine, from the moment that the first of them runs.

    Attributes:
        printing: Held while ranks print their stacks; a rank that is asked to end meanwhile prints none.
    """

    def __init__(
        self,
        seconds: float,
        ranks: Callable[[], Collection[RankLog]],
        on_timeout: Callable[[], None],
        *,
        quiet: bool = False,
    ) -> None:
        self._seconds = seconds
        self._ranks = ranks
        self._on_timeout = on_timeout
        self._quiet = quiet
        self._sensors: dict[int, heartbeat.Sensor] = {}
        self.printing = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="accel-watchdog", daemon=True)
        self._thread.start()

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables that a process needs; an earlier attempt's progress is forgotten."""
        found = {"PYTHONFAULTHANDLER": "1"}  # prints all stacks on SIGABRT
        if heartbeat.Sensor.possible():
            sensor = self._sensors.get(local_rank)
            if sensor is None:
                sensor = self._sensors[local_rank] = heartbeat.Sensor()
            sensor.reset()  # a restart begins without progress
            found[heartbeat.VARIABLE] = sensor.path
        return found

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join()
        for sensor in self._sensors.values():
            sensor.close()

    def _progress(self, log: RankLog) -> heartbeat.Progress | None:
        sensor = self._sensors.get(log.local_rank)
        return None if sensor is None else sensor.read()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._seconds / 8)):  # late by an eighth at most
            running = [log for log in list(self._ranks()) if log.pid and log.ended_at is None]
            if not running:
                continue
            silent = time.monotonic() - max(progressed_at(log.heard_at, self._progress(log)) for log in running)
            if silent < self._seconds:
                continue
            self._on_timeout()
            self._report(running)
            with self.printing:
                self._end(running, signal.SIGABRT)
            self._end(running, signal.SIGKILL)

    def _end(self, logs: Collection[RankLog], number: signal.Signals) -> None:
        """Send a signal to those that run, and wait until they have ended."""
        for log in logs:
            if log.ended_at is None:
                signal_group(log.pid, number)
        deadline = time.monotonic() + _PRINTING
        while any(log.ended_at is None for log in logs) and time.monotonic() < deadline:
            if self._done.wait(_LOOK):
                return

    def _report(self, running: Collection[RankLog]) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        lines = [f"\naccel launch: no rank made progress for {self._seconds:g} s; what every rank did last:"]
        for log in running:
            progress = self._progress(log)
            line = f"  rank {log.rank}  printed {now - log.heard_at:.1f} s ago"
            if progress is not None and progress.beats:
                line += f", batch or optimizer step {progress.beats} was {now - progress.at:.1f} s ago"
            lines.append(line)
        say("\n".join(lines))
