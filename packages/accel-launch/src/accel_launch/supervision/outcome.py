"""How processes ended: exit code, signal or out of memory, and which one failed first."""

import contextlib
import itertools
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_core.host.run_card import MEMORY_RAN_OUT
from accel_launch.supervision.streams import RankLog
from accel_launch.supervision.traceback_hold import TRACEBACK

TRY_AGAIN = 75
"""Exit code of a process that saved its state and asks to be restarted: EX_TEMPFAIL of sysexits.h."""

_TRACEBACK_COUNTS_FOR = 60.0
_KILLED_BEFORE_S = 1.0
_BY_LAUNCHER = (-signal.SIGTERM, -signal.SIGKILL)
_BEFORE_TRACEBACK = re.compile(rf"^(?=.*{re.escape(TRACEBACK.decode())})", re.MULTILINE)
_LEADS_ON = re.compile(r"\n\n(?:\[rank\d+\]: ?)?(?:During handling of .*|The above exception was .*):\n\n$")
_CRASH_AT_EXIT = re.compile(r"^(?:\[rank\d+\]: ?)?terminate called ", re.MULTILINE)
"""What C++ prints if threads of a library still run when a process that raised an exception ends."""


@dataclass(frozen=True)
class ExitOutcome:
    """How the process of one rank ended."""

    rank: int
    local_rank: int
    pid: int
    status: int  # exit code, or minus the number of the signal that ended it
    stopped: bool  # the launcher ended it because of something else
    failed_at: float  # on the monotonic clock, in seconds
    out_of_memory: bool = False
    traceback: str = ""

    @property
    def fault(self) -> str:
        """Return the last line of the traceback, above those that say what held memory."""
        return [*itertools.takewhile(lambda line: MEMORY_RAN_OUT not in line, self.traceback.splitlines())][-1]

    @property
    def how(self) -> str:
        """Return the exit code or signal in words."""
        if self.status >= 0:
            return f"exit code {self.status}"
        name = next((known.name for known in signal.Signals if known == -self.status), f"signal {-self.status}")
        if self.out_of_memory:
            return f"killed by the system because memory ran out ({name})"
        return f"killed by {name}"


def memory_kills() -> int:
    """Return how often the system of this machine has killed for memory, in control groups too."""
    with contextlib.suppress(OSError):  # Linux before 4.13 has no such line
        return sum(map(int, re.findall(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)))
    return 0


def last_traceback(tail: bytes) -> str:
    """Return the last traceback of what a process printed, with the chain that led to it."""
    *parts, last = _BEFORE_TRACEBACK.split(tail.decode(errors="replace").replace("\r\n", "\n"))
    if not parts:
        return ""
    while _LEADS_ON.search(parts[-1]):
        last = parts.pop() + last
    return without_crash(last).strip("\n")


def without_crash(text: str) -> str:
    """Return what a process printed before a crash at exit."""
    return _CRASH_AT_EXIT.split(text)[0]


def failed_at(log: RankLog, status: int) -> float:
    """Return when a rank went wrong: when its last traceback began, or when it ended."""
    ended = time.monotonic() if log.ended_at is None else log.ended_at
    # A rank that hangs at exit still failed when it raised.
    if _may_have_raised(status) and log.traceback_at is not None and ended - log.traceback_at < _TRACEBACK_COUNTS_FOR:
        return log.traceback_at
    # On a busy machine others may raise because of its closed connections before the system reports its end.
    return ended - _KILLED_BEFORE_S if status == -signal.SIGKILL else ended


def _may_have_raised(status: int) -> bool:
    # Python ends by SIGINT after a KeyboardInterrupt; a library's threads may crash while a process that raised ends.
    return status > 0 or status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGINT)


def first_failure(outcomes: Iterable[ExitOutcome]) -> ExitOutcome | None:
    """Return the first failure, or None if every process exited with 0 or was stopped."""
    failures = [outcome for outcome in outcomes if outcome.status != 0 and not outcome.stopped]
    return min(failures, key=lambda outcome: outcome.failed_at, default=None)


def cause_of(outcomes: Sequence[ExitOutcome]) -> ExitOutcome | None:
    """Return the outcome that explains the end of a run: the first failure, else the first that has a traceback."""
    raised = [outcome for outcome in outcomes if outcome.traceback]
    # After a signal to all, none failed first; one may have raised.
    return first_failure(outcomes) or min(raised, key=lambda outcome: outcome.failed_at, default=None)


def outcomes(
    logs: Mapping[int, RankLog],
    statuses: Mapping[int, int],
    *,
    all_stopped: bool = False,
    out_of_memory: bool = False,
) -> list[ExitOutcome]:
    """Collect how the processes of this machine ended; others than the first that failed may have been stopped."""
    times = {rank: failed_at(logs[rank], status) for rank, status in statuses.items()}
    first = min((rank for rank, status in statuses.items() if status), key=times.__getitem__, default=None)
    found = []
    for rank, status in sorted(statuses.items()):
        by_us = all_stopped or (rank != first and status in _BY_LAUNCHER)
        found.append(
            ExitOutcome(
                rank=rank,
                local_rank=logs[rank].local_rank,
                pid=logs[rank].pid,
                status=status,
                stopped=by_us and status < 0,  # one that exits with a code failed by itself
                failed_at=times[rank],
                out_of_memory=out_of_memory and status == -signal.SIGKILL and not by_us,
                traceback=last_traceback(bytes(logs[rank].tail)) if _may_have_raised(status) else "",
            )
        )
    return found


def want_restart(outcomes: Iterable[ExitOutcome]) -> bool:
    """Return whether every process exited with the code that asks for a restart of the run."""
    # All of them: one alone did not save with the others.
    return {outcome.status for outcome in outcomes} == {TRY_AGAIN}


def shell_status(status: int) -> int:
    """Return the exit status that a shell shows: 128 + N for a process ended by signal N."""
    return 128 - status if status < 0 else status
