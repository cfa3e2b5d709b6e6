"""Ranks on this machine that a command starts and ends by itself, each with a file for what it prints."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accel_launch.supervision.orphans import RunMark, signal_group

_POLL_S = 0.05
_PRINTING_S = 5.0


@dataclass(frozen=True)
class RanksEnded:
    """How ranks ended."""

    codes: tuple[int, ...]  # negative where a signal ended the rank, ours included
    timed_out: bool
    logs: tuple[Path, ...]

    @property
    def failed(self) -> int | None:
        """The rank that failed, preferably by itself and not because it was ended; `None` if all succeeded."""
        ranks = [rank for rank, code in enumerate(self.codes) if code]
        # Negative: ended by a signal, perhaps ours.
        return next((rank for rank in ranks if self.codes[rank] > 0), ranks[0] if ranks else None)

    def tail(self, rank: int, lines: int = 30) -> str:
        """Return the last lines that a rank printed."""
        return "\n".join(self.logs[rank].read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """On SIGTERM, end the ranks and remove folders."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables by which a rank finds the others on this machine; none of a single process."""
    if size == 1:
        return {}
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def run_ranks(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    place: Path,
    timeout: float,
    grace: float | None = None,
) -> RanksEnded:
    """Start ranks and wait for them. The first failure ends the others, and none outlives the call."""
    logs = tuple(place / f"{rank}.log" for rank in range(len(commands)))
    ranks: list[subprocess.Popen[bytes]] = []
    mark = RunMark()
    try:
        for command, environment, path in zip(commands, environments, logs, strict=True):
            with open(path, "w") as log:
                ranks.append(
                    subprocess.Popen(
                        command,
                        # For the stacks of a rank that hangs.
                        env={**environment, **mark.variables(), "PYTHONFAULTHANDLER": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # a group of its own, so that all it starts can be ended
                    )
                )
        timed_out = _wait(ranks, timeout, grace)
        if timed_out:
            _show_stacks(ranks)
    finally:
        codes = tuple(_end(process) for process in ranks)
        mark.end_orphans()
    return RanksEnded(codes, timed_out, logs)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout: float, grace: float | None) -> bool:
    """Wait until all have ended or one has failed, and return whether their time ran out before."""
    deadline, shortened = time.monotonic() + timeout, False
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            return False
        if time.monotonic() > deadline:
            return True
        if grace is not None and not shortened and any(process.poll() == 0 for process in ranks):
            deadline, shortened = min(deadline, time.monotonic() + grace), True
        time.sleep(_POLL_S)
    return False


def _show_stacks(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Make the remaining ranks print their stacks, by Python's fault handler, and end."""
    for process in ranks:
        if process.poll() is None:
            signal_group(process.pid, signal.SIGABRT)  # on which the fault handler prints all stacks
    deadline = time.monotonic() + _PRINTING_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill a remaining rank with what it started, such as the workers of its loaders; return its exit code."""
    if process.poll() is None:
        signal_group(process.pid, signal.SIGKILL)
    return process.wait()
