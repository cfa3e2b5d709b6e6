"""Time limits of tests: they end what hangs, and grow with how slow the machine is at the moment."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

STACKS = signal.SIGRTMAX - 5
"""The signal on which programs that tests fork print where their threads are; it ends any other."""
_SHORTEST = 60.0
_FACTOR = 10.0
_LOOPS = 1_000_000
_QUIET = 0.05
"""Seconds that the loops take on a quiet machine of 2026."""

_slowest = 0.0


def slowness() -> float:
    """Return how many times longer than on a quiet machine a fixed piece of work takes now, at least 1.

    The slowest measurement of this process counts: whatever shared the processors then may come back.
    """
    global _slowest
    begun, total = time.perf_counter(), 0
    for number in range(_LOOPS):
        total += number * number
    _slowest = max(_slowest, 1.0, (time.perf_counter() - begun) / _QUIET)
    return _slowest


def limit(quiet: float = 6.0) -> float:
    """Return the seconds after which a step of a test has to be taken for hung."""
    return max(_SHORTEST, _FACTOR * quiet) * (_slowest or slowness())  # measured once: it takes 0.05 s


class Deadline:
    """The moment at which a test gives up waiting; it moves on where the machine turns out to be slower by then."""

    def __init__(self, quiet: float = 6.0, *, exactly: float | None = None) -> None:
        self._begun = time.monotonic()
        self._quiet = quiet
        self._exactly = exactly

    @property
    def left(self) -> float:
        """Seconds until then, never below zero."""
        seconds = limit(self._quiet) if self._exactly is None else self._exactly
        return max(0.0, self._begun + seconds - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the time has passed, by what the machine needs now."""
        if not self.left and self._exactly is None:
            slowness()
        return not self.left


def wait_until(condition: Callable[[], object], *, quiet: float = 6.0, pause: float = 0.01) -> bool:
    """Wait for a condition of another process or thread."""
    deadline = Deadline(quiet)
    while not condition():
        if deadline.is_over:
            return bool(condition())
        time.sleep(pause)
    return True


def communicate(process: subprocess.Popen[str], *, quiet: float = 6.0) -> tuple[str, str]:
    """Return what a process prints until it ends, as `Popen.communicate` does.

    Raises:
        subprocess.TimeoutExpired: It hangs; it has been killed.
    """
    deadline = Deadline(quiet)
    while not deadline.is_over:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, errors = process.communicate(timeout=deadline.left)
            return out or "", errors or ""
    with contextlib.suppress(psutil.NoSuchProcess):  # what ended by now
        hung = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in hung:
            each.send_signal(STACKS)
            time.sleep(0.2)  # two would print at once
        _, alive = psutil.wait_procs(hung, 2)  # the launcher passes on what its ranks print
        for each in alive:
            each.kill()
    process.kill()
    out, errors = process.communicate()
    sys.stderr.write(f"{process.args!r} hung, and had printed:\n{out}\n{errors}\n")
    raise subprocess.TimeoutExpired(process.args, limit(quiet), out, errors)


def run(
    command: Sequence[str] | str,
    *,
    quiet: float = 6.0,
    check: bool = False,
    started_by: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` with captured text does.

    Raises:
        subprocess.CalledProcessError: `check`, and it failed; what it had printed is on stderr.
        subprocess.TimeoutExpired: It hangs; it has been killed.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with started_by(command, text=True, **streams) as process:
        out, errors = communicate(process, quiet=quiet)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
    if check and done.returncode:
        sys.stderr.write(f"{done.args!r} failed, and had printed:\n{out}\n{errors}\n")
        done.check_returncode()
    return done
