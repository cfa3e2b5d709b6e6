"""The one place that supervises a launch: streams, signals, watchdog, failures, and cleanup.

A launcher makes a `Supervisor`, starts its processes, tells it about each, and reports their exit codes:

    with Supervisor(settings, command) as supervisor:       # leaves no process behind, whatever happens
        streams = supervisor.follow(rank, local_rank)       # what the process writes to
        supervisor.started(rank, pid)
        ...
    status = supervisor.report({rank: exit_code})
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_core.errors import LaunchError
from accel_core.host.run_card import VARIABLE, CardReader
from accel_launch.settings.rules import tee_of
from accel_launch.supervision.logs import LogFolder
from accel_launch.supervision.orphans import OrphanReaper, RunMark, signal_group
from accel_launch.supervision.outcome import (
    ExitOutcome,
    cause_of,
    first_failure,
    memory_kills,
    outcomes,
    shell_status,
    want_restart,
)
from accel_launch.supervision.signals import TERMINATION_GRACE_S, SignalHandlers
from accel_launch.supervision.streams import Followed, RankLog, Streams
from accel_launch.supervision.watchdog import Watchdog

_REPORT = "accel_launch.supervision.report"  # imported when there is something to report
_EXPLANATION = "accel_launch.supervision.explanation"


class Supervisor:
    """The processes of one launch on this machine, from before they start to the report of how they ended.

    Make it before heavy imports: it forks, and no other thread may run then.

    Raises:
        ConfigurationError: The folder for logs cannot be used.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        command: Sequence[str],
        on_signal: Callable[[signal.Signals], None] | None = None,
        *,
        hold: bool = True,
    ) -> None:
        self.attempt = 0
        self.elsewhere = ""
        self.signals = SignalHandlers(on_signal or self._end_groups, self.kill, self.forward_signal)
        self._settings, self._command = settings, command
        self._began = time.monotonic()
        self._mark = RunMark()
        self._logs = LogFolder(Path(settings["log_dir"]).expanduser()) if settings["log_dir"] else None
        self._reaper = OrphanReaper(self._mark.run_id)  # a fork: before the threads of streams and watchdog
        self.streams = Streams(self._logs, hold=hold and not settings["quiet"])
        self._memory_kills = memory_kills()
        self._card = CardReader()
        self._reasons: list[str] = []
        self._killer: threading.Timer | None = None
        self._watchdog: Watchdog | None = None
        if settings["watchdog"]:
            self._watchdog = Watchdog(
                float(settings["watchdog"]),
                self.streams.ranks.values,
                self._stopped_by_watchdog,
                quiet=bool(settings["quiet"]),
            )

    def __enter__(self) -> "Supervisor":
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Leave no process behind. If an error ends the launch, all output is passed on and there is no report."""
        self._close()
        if kind is not None:
            self.release()

    def _stopped_by_watchdog(self) -> None:
        self._reasons.append("watchdog")
        # Held back, so that the stacks of one rank are not printed between those of another.
        for log in self.running():
            self.streams.collect(log)

    def await_stacks(self) -> None:
        """Wait while the watchdog lets ranks print where they are."""
        if self._watchdog is not None:
            with self._watchdog.printing:
                pass

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables that a process needs to be watched."""
        watched = {} if self._watchdog is None else self._watchdog.variables(local_rank)
        card = self._card.variables() if local_rank == 0 else {VARIABLE: ""}  # a launcher around this one has its own
        return {**self._mark.variables(), **watched, **card}

    def follow(self, rank: int, local_rank: int) -> dict[str, Followed]:
        """Begin the record of a rank that is about to start, and make the streams that it writes to."""
        log = self.streams.add_rank(rank, local_rank)
        wanted = marks(self._settings, local_rank)
        return {name: self.streams.follow(log, name, mark=mark) for name, mark in wanted.items()}

    def started(self, rank: int, pid: int) -> None:
        """Note that the process of a rank runs."""
        self._reaper.watch(pid)
        self.streams.started(self.streams.ranks[rank], pid)

    @property
    def _folder(self) -> str:
        """Return the folder of the script, or of where a module is started."""
        script = getattr(self._settings, "script", None)
        return os.path.dirname(os.path.abspath("x" if self._settings.get("module") else script or "x"))

    def running(self) -> list[RankLog]:
        """Return the records of the ranks that run."""
        return [log for log in list(self.streams.ranks.values()) if log.pid and log.ended_at is None]

    def forward_signal(self, number: signal.Signals) -> None:
        """Send a signal to each rank, and not to what it started."""
        for log in self.running():
            with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
                os.kill(log.pid, number)

    def terminate(self) -> None:
        """Ask every rank, and what it started, to end."""
        self._signal_groups(signal.SIGTERM)

    def kill(self) -> None:
        """End every rank, and what it started, at once."""
        self._signal_groups(signal.SIGKILL)

    def _end_groups(self, number: signal.Signals) -> None:
        self._signal_groups(number)
        # By a timer: the launcher waits for its process without a limit, and Python takes up such a wait again after
        # the signal was handled: https://peps.python.org/pep-0475/
        self.kill_after(TERMINATION_GRACE_S)

    def _signal_groups(self, number: signal.Signals) -> None:
        for log in self.running():
            signal_group(log.pid, number)

    def kill_after(self, seconds: float) -> None:
        """End the ranks that run now if they still run after a while."""
        logs = self.running()  # collected now: after a restart the numbers belong to other processes

        def kill() -> None:
            for log in logs:
                if log.ended_at is None:
                    signal_group(log.pid, signal.SIGKILL)

        self._killer = threading.Timer(seconds, kill)
        self._killer.daemon = True  # it must not keep the launcher alive
        self._killer.start()

    def _close(self) -> None:
        self.signals.ignore()  # a second signal must not end the cleanup half-way
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._killer is not None:
            self._killer.cancel()
        for log in self.streams.ranks.values():
            if log.pid:
                signal_group(log.pid, signal.SIGTERM, log.born)  # the group outlives the rank that led it
        left = self._mark.end_orphans()  # what left its group, found by the run's variable
        if left and not self._settings["quiet"]:
            import_module(_REPORT).report_left_behind(left)
        # After the last process has ended, so that what they printed at exit is read.
        self.streams.stop()
        # After all else: should the launcher be killed meanwhile, the reaper still ends what is left.
        self._reaper.release()
        self.signals.restore()

    def release(self) -> None:
        """Pass on what was held back of every rank."""
        for log in self.streams.ranks.values():
            self.streams.release(log)

    def succeed(self) -> int:
        """Pass on what was held back, show the card of the run where the ranks wrote one, and return the status."""
        self.release()
        facts = self._card.close()
        if facts and not self._settings["quiet"]:
            seconds = time.monotonic() - self._began
            import_module(_REPORT).report_card(facts, seconds, str(getattr(self._settings, "script", "")))
        return 0

    def report(self, statuses: Mapping[int, int]) -> int:
        """Write and print the record of a failure, if there was one."""
        sent = self.signals.first
        if sent is not None:
            self._reasons.append(sent.name)
        if statuses and not (self._reasons or self.elsewhere or any(statuses.values())):
            return self.succeed()
        ended = self._outcomes(statuses)
        reason = f"another machine: {self.elsewhere}" if self.elsewhere else next(iter(self._reasons), "failure")
        self._notify(ended, reason)
        if sent is not None and not want_restart(ended):  # preempted runs end with the status to be requeued
            return shell_status(-sent)
        if reason == "watchdog":
            return shell_status(-signal.SIGABRT)
        first = first_failure(ended)
        return 1 if first is None else shell_status(first.status)

    def _outcomes(self, statuses: Mapping[int, int]) -> list[ExitOutcome]:
        """Put together how the ranks ended; those that ended because another one failed were stopped."""
        return outcomes(
            self.streams.ranks,
            statuses,
            all_stopped=bool(self._reasons or self.elsewhere),
            out_of_memory=memory_kills() > self._memory_kills,
        )

    def restarting(self, statuses: Mapping[int, int], most: int) -> None:
        """Print why the ranks are restarted."""
        ended = self._outcomes(statuses)
        message = self._finish(ended)
        if first_failure(ended) is not None and not self._settings["quiet"]:
            import_module(_REPORT).report_restart(ended, message, self.attempt + 1, most)
        self._reasons.clear()  # the next failure has its own reason

    def _finish(self, ended: Sequence[ExitOutcome]) -> str:
        """Return the end of the report: the traceback of the cause, unless it was passed on already.

        What was held back of other ranks that raised is dropped, since they failed because of the cause; the files of
        the failure have it. Anything else that was held back is passed on.
        """
        cause, message = cause_of(ended), ""
        for outcome in ended:
            log = self.streams.ranks[outcome.rank]
            if "watchdog" in self._reasons:
                import_module(_REPORT).report_stacks(outcome.rank, self.streams.take_held(log))
            elif outcome is cause and outcome.traceback:
                message = outcome.traceback
                held = self.streams.take_held(log).decode(errors="replace").replace("\r\n", "\n")
                before, found, after = held.partition(outcome.traceback)  # other lines were held with it
                import_module(_REPORT).pass_on(before + after)
                if not found:
                    message = outcome.fault  # the process went on after its traceback, which was shown then
                elif not self._settings.get("all_frames"):
                    message = import_module(_EXPLANATION).fold(message, self._folder)
                cure = import_module(_EXPLANATION).cure_of(outcome.traceback)
                message += f"\n{cure}" if cure else ""
            elif cause is not None and (outcome.stopped or outcome.traceback):
                self.streams.take_held(log)
            else:
                self.streams.release(log)
        return message

    def _notify(self, ended: Sequence[ExitOutcome], reason: str) -> None:
        report = import_module(_REPORT)
        record = report.failure_record(
            ended,
            run_id=self._mark.run_id,
            command=self._command,
            seconds=time.monotonic() - self._began,
            reason=reason,
            attempt=self.attempt,
        )
        logs = {outcome.rank: self.streams.ranks[outcome.rank] for outcome in ended}
        folder = None if self._logs is None else self._logs.path
        message = self._finish(ended)
        early = import_module(_EXPLANATION).left_early(ended, self._folder)
        quiet = bool(self._settings["quiet"])
        report.report_failure(ended, logs, record, message, log_dir=folder, quiet=quiet, early=early)


def cannot_start(program: str, error: OSError) -> LaunchError:
    """Return the error for a program that cannot be started."""
    return LaunchError(
        f"The program could not be started; {program!r} gives: {error.strerror}. Check the name and that it may be "
        "executed."
    )


def marks(settings: Mapping[str, Any], local_rank: int) -> dict[str, str]:
    """Decide which streams of a rank the launcher reads, and the mark before their lines."""
    tee = tee_of(str(settings["tee"]), local_rank)
    mark = f"[{settings['role']}{local_rank}]: "
    found = {"stderr": mark if tee & 2 else ""}  # always read, as the report of a failure quotes its end
    if tee & 1 or settings["log_dir"] or settings["watchdog"]:  # else ranks keep the launcher's own output
        found["stdout"] = mark if tee & 1 else ""
    return found
