"""Processes forked from this one, for functions that no other process can import."""

import contextlib
import functools
import json
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.elastic.rendezvous import RendezvousHandler

from accel_core.errors import LaunchError
from accel_core.host.environ import text, write
from accel_launch.launchers.rendezvous import leave
from accel_launch.launchers.torch_loggers import torch_loggers
from accel_launch.supervision.orphans import RunMark
from accel_launch.supervision.report import report_left_behind
from accel_launch.supervision.signals import SignalHandlers
from accel_launch.terminal import say

__all__ = ["NotebookRankError", "run_forked"]


class NotebookRankError(ChildFailedError, LaunchError):
    """A rank of `notebook_launcher` or `debug_launcher` failed: our error, and the one that torch's launcher raises."""

    def __init__(self, message: str, failures: dict[int, ProcessFailure]) -> None:
        LaunchError.__init__(self, message, failures)
        self.name, self.failures = "notebook_launcher", failures  # torch's own initializer would format a table

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


class _Forked:
    """The ranks that are forked for one call: their exceptions, and what they leave behind.

    torch tells about one rank that failed, and that is often one whose partner was gone. Every rank therefore has
    a file of its own, in which torch records its exception; the oldest one is the cause. A rank also puts the run's
    mark into its environment, by which processes that it starts are found afterwards; the environment of this process,
    which may start others meanwhile, is left alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = RunMark()

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its exceptions recorded."""

        @functools.wraps(function, assigned=("__module__", "__doc__"))
        def run(*args: object) -> Any:
            # torch ends the partners of a rank that failed. Its handler, which is inherited, would raise in them.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            file = f"{text('TORCHELASTIC_RESTART_COUNT')}-{text('RANK')}.json"
            for name, value in {**self._mark.variables(), "TORCHELASTIC_ERROR_FILE": self.folder / file}.items():
                write(name, value)
            return record(function)(*args)

        return run

    def first_exception(self) -> tuple[int, str] | None:
        """Return the rank that raised first in the last attempt, and its traceback; None where none raised."""
        attempt, found = 0, None
        for file in sorted(self.folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True):
            count, _, rank = file.stem.partition("-")
            if int(count) < attempt:  # it was restarted
                break
            with contextlib.suppress(ValueError):  # a rank may be stopped while it writes
                found = int(rank), str(json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"])
            attempt = int(count)
        return found

    def end_what_is_left(self) -> None:
        """End processes that outlived the ranks that started them."""
        left = self._mark.end_orphans()
        if left:
            report_left_behind(left)


class _ForkedAgent(LocalElasticAgent):
    """torch's agent, which says so when it restarts the ranks."""

    def __init__(self, forked: _Forked, spec: WorkerSpec, prefix: str | None) -> None:
        logs = DefaultLogsSpecs(log_dir=str(forked.folder / "logs"))
        super().__init__(spec, logs, start_method="fork", log_line_prefix_template=prefix)
        self._forked = forked

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        raised = self._forked.first_exception()
        cause = "a rank failed" if raised is None else f"rank {raised[0]} failed first, with an exception:\n{raised[1]}"
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        say(f"accel: {cause}\nAll ranks start again (restart {attempt} of {worker_group.spec.max_restarts}).")
        super()._restart_workers(worker_group)


def run_forked(
    function: Callable[..., Any],
    args: Sequence[Any],
    rendezvous: RendezvousHandler,
    *,
    processes: int,
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function in processes forked under torch's elastic agent.

    Raises:
        NotebookRankError: A process failed; the message ends with the traceback of the one that failed first.
    """
    signals = SignalHandlers(lambda number: None, lambda: None, lambda number: None)
    with tempfile.TemporaryDirectory(prefix="accel-forked-") as folder, torch_loggers(talk=False):
        forked = _Forked(Path(folder))
        spec = WorkerSpec(
            role="default",
            local_world_size=processes,
            entrypoint=forked.watched(function),
            args=tuple(args),
            rdzv_handler=rendezvous,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
        )
        try:
            result: RunResult | None = _ForkedAgent(forked, spec, log_line_prefix_template).run()
        finally:
            leave(rendezvous)
            forked.end_what_is_left()
            signals.restore()  # torch takes them over when it starts processes, and a notebook goes on after the call
        if result is not None and result.is_failed():
            raise _rank_error(forked, result.failures)


def _rank_error(forked: _Forked, failures: dict[int, ProcessFailure]) -> NotebookRankError:
    raised = forked.first_exception()
    if raised is not None:
        return NotebookRankError(f"Rank {raised[0]} failed first, with an exception:\n{raised[1]}", failures)
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    return NotebookRankError(
        f"Rank {rank} failed first, with exit code {failure.exitcode}: {failure.message}", failures
    )
