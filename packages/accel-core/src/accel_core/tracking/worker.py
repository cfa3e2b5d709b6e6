"""A thread with a queue: whatever its work does, nobody waits for it longer than they choose."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["MOST_WAITING", "Job", "TrackerWorker"]

MOST_WAITING = 100_000
"""How many jobs may wait in one queue, so that a tracker or disk that hangs does not fill the memory."""

Job = Callable[[], object]
"""What a thread does at a time; what it returns is not looked at."""


class TrackerWorker:
    """Carries jobs out in a thread of its own, in the order of `put`.

    Every tracker of a run has one, and so has the file that records the run. A job deals with its own errors; one that
    raises all the same ends the thread, and nobody waits for what it leaves.
    """

    def __init__(self, name: str) -> None:
        # A job leaves the queue when it is done and not when it begins, so an empty queue is a thread at rest. `put` is
        # on the path of every training step: appending to both takes no lock that Python code holds.
        self._jobs: deque[Job | threading.Event | None] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._closing = False
        self._abandoned = False
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> bool:
        """Queue a job."""
        if self._closing or len(self._jobs) >= MOST_WAITING:
            return False
        self._append(job)
        return True

    def drain(self, seconds: float) -> bool:
        """Wait until the jobs that are queued now are done."""
        if self._jobs and self._closing:
            self._thread.join(seconds)
        elif self._jobs:
            reached = threading.Event()
            self._append(reached)
            # A thread that failed meanwhile has already looked for events to set.
            return (self._failed or reached.wait(seconds)) and not self._failed
        return not self._jobs and not self._failed

    def finish(self, last: Job) -> None:
        """Queue the last job, even if the queue is full."""
        if not self._closing:
            self._closing = True
            self._append(last)
            self._append(None)

    def close(self, seconds: float) -> bool:
        """Wait for the last job, which `finish` queued."""
        done = self.drain(seconds)
        self._abandoned = True
        if done:
            self._thread.join()
        return done

    def _append(self, job: Job | threading.Event | None) -> None:
        self._jobs.append(job)
        self._wakeups.put(None)

    def _work(self) -> None:
        try:
            self._work_until_last()
        except BaseException:
            self._failed = self._closing = True
            raise
        finally:
            for job in self._jobs.copy():
                if isinstance(job, threading.Event):
                    job.set()
            if not self._failed:
                self._jobs.clear()

    def _work_until_last(self) -> None:
        while True:
            self._wakeups.get()
            job = self._jobs[0]
            if job is None:
                return
            if isinstance(job, threading.Event):
                self._jobs.popleft()
                job.set()
                continue
            if not self._abandoned:
                job()
            self._jobs.popleft()
