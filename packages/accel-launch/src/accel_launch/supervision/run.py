"""Runs one command and sees it through: streams, signals, failure, and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from accel_core.errors import LaunchError
from accel_launch.settings.tee import tee_of
from accel_launch.supervision.guard import RUN_VARIABLE, Guard, end_group, sweep
from accel_launch.supervision.outcome import MemoryKills, endings, shell_status, want_restart
from accel_launch.supervision.streams import Streams
from accel_launch.supervision.watchdog import Watchdog

__all__ = ["HANDED_ON", "PATIENCE", "SIGNALS", "marks", "supervise"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that reach every process of the run, and end it."""

HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the ranks get as well, and make of what they like."""

_REPORT = "accel_launch.supervision.report"
PATIENCE = 30.0
"""Seconds that processes have to end after a signal that a person or a scheduler sent: time to save a state."""


class _Signals:
    """Hands the launcher's signals to a function, and gives them back afterwards."""

    def __init__(self, hand_on: Any) -> None:
        self.first: signal.Signals | None = None
        self._hand_on = hand_on
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        for number in HANDED_ON:
            self._before[number] = signal.signal(number, lambda number, _: self._hand_on(signal.Signals(number)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again = self.first is not None
        self.first = self.first or signal.Signals(number)
        self._hand_on(signal.SIGKILL if again else signal.Signals(number))


def supervise(command: Sequence[str], environment: Mapping[str, str], settings: Mapping[str, Any]) -> int:
    """Run one command to its end.

    Its error stream is passed on and remembered. A signal to the launcher goes to the whole process group; a second one
    kills it. When the command fails, the record of the failure is written and a person is told.

    Args:
        command: Program and arguments.
        environment: The whole environment of the process.
        settings: Settings of the run: log_dir, tee, watchdog, quiet.

    Returns:
        The exit status for the shell: the command's own, or 128 + N after signal N.

    Raises:
        LaunchError: The program cannot be started.
    """
    run_id = os.urandom(16).hex()
    started = time.monotonic()
    log_dir = Path(settings["log_dir"]) if settings["log_dir"] else None
    variables = {**environment, RUN_VARIABLE: run_id}
    guard = Guard(run_id)
    streams = Streams(log_dir)
    log = streams.add_rank(0, 0)
    wanted = marks(settings, 0)
    ends = {name: streams.follow(log, name, mark=mark).child_end for name, mark in wanted.items()}
    memory = MemoryKills()
    reasons: list[str] = []
    dog = None
    if settings["watchdog"]:
        dog = Watchdog(
            float(settings["watchdog"]),
            streams.ranks.values,
            lambda: reasons.append("watchdog"),
            quiet=bool(settings["quiet"]),
        )
        variables.update(dog.variables(0))
    sys.stdout.flush()
    try:
        process = subprocess.Popen(
            list(command), env=variables, start_new_session=True, stdout=ends.get("stdout"), stderr=ends["stderr"]
        )
    except OSError as error:
        guard.release()
        raise LaunchError(
            f"The program could not be started; {command[0]!r} gives: {error.strerror}. Check the name and that it may "
            "be executed."
        ) from None
    guard.watch(process.pid)
    streams.started(log, process.pid)

    def tell(number: signal.Signals) -> None:
        process.send_signal(number) if number in HANDED_ON else end_group(process.pid, number)

    with _Signals(tell) as signals:
        status = _wait(process, signals)
    if dog is not None:
        dog.stop()
    end_group(process.pid, signal.SIGTERM)
    left = sweep(run_id)
    if left and not settings["quiet"]:
        import_module(_REPORT).report_left_behind(left)
    streams.stop()
    guard.release()
    if signals.first is not None:
        reasons.append(signals.first.name)
    if status == 0 and not reasons:
        return 0
    stopped = [0] if reasons else []
    ended = endings(streams.ranks, {0: status}, stopped, memory)
    reason = reasons[0] if reasons else "failure"
    report = import_module(_REPORT)
    record = report.failure_record(
        ended, run_id=run_id, command=command, seconds=time.monotonic() - started, reason=reason
    )
    report.report_failure(ended, streams.ranks, record, log_dir=log_dir, quiet=bool(settings["quiet"]))
    if signals.first is not None and not want_restart(ended):
        return shell_status(-signals.first)
    return shell_status(status)


def _wait(process: "subprocess.Popen[bytes]", signals: _Signals) -> int:
    deadline: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=None if signals.first is None else 0.2)
        deadline = deadline or time.monotonic() + PATIENCE
        if time.monotonic() > deadline:
            end_group(process.pid, signal.SIGKILL)


def marks(settings: Mapping[str, Any], local_rank: int) -> dict[str, str]:
    """Decide which streams of a rank the launcher reads, and the mark before their lines.

    Args:
        settings: Settings of the run: tee, log_dir, watchdog, role.
        local_rank: Rank among those of this machine.

    Returns:
        The mark by stream; an empty mark passes everything on untouched. The error stream is always read.
    """
    tee = tee_of(str(settings["tee"]), local_rank)
    mark = f"[{settings['role']}{local_rank}]: "
    found = {"stderr": mark if tee & 2 else ""}
    if tee & 1 or settings["log_dir"] or settings["watchdog"]:
        found["stdout"] = mark if tee & 1 else ""
    return found
