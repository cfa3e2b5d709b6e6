"""Processes forked from this one, for functions that no other process can import."""

import contextlib
import json
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.elastic.rendezvous import RendezvousHandler

from accel_core.errors import LaunchError
from accel_launch.launchers.rendezvous import leave
from accel_launch.launchers.torch_loggers import torch_loggers
from accel_launch.supervision.signals import SignalHandlers
from accel_launch.terminal import say


class NotebookRankError(ChildFailedError, LaunchError):
    """A rank of `notebook_launcher` or `debug_launcher` failed: our error, and the one that torch's launcher raises."""

    def __init__(self, message: str, failures: dict[int, ProcessFailure]) -> None:
        LaunchError.__init__(self, message, failures)
        self.name, self.failures = "notebook_launcher", failures  # torch's own initializer would format a table

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


def _run(function: Callable[..., Any], *args: object) -> Any:
    """Run the function in a rank, with its exception recorded in the file that torch gives the rank."""
    # torch ends the partners of a rank that failed. Its handler, which is inherited, would raise in them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return record(function)(*args)


def first_exception(files: Mapping[int, Path]) -> str:
    """Return which rank raised first, by torch's error files, with its traceback; nothing where none raised.

    torch itself tells about one rank that failed, and that is often one whose partner was gone.
    """
    raised = {rank: file.stat().st_mtime_ns for rank, file in files.items() if file.exists()}
    for rank in sorted(raised, key=raised.__getitem__):
        with contextlib.suppress(ValueError):  # a rank may be stopped while it writes
            stack = json.loads(files[rank].read_text())["message"]["extraInfo"]["py_callstack"]
            return f"Rank {rank} failed first, with an exception:\n{stack}"
    return ""


class _ForkedAgent(LocalElasticAgent):
    """torch's agent, which tells what went wrong, and says so when it restarts the ranks."""

    def __init__(self, spec: WorkerSpec, folder: str, prefix: str | None) -> None:
        super().__init__(spec, DefaultLogsSpecs(folder), start_method="fork", log_line_prefix_template=prefix)

    def first_exception(self) -> str:
        """Return which rank raised first in the last attempt, with its traceback; nothing where none raised."""
        files = self._pcontext.error_files if self._pcontext is not None else {}
        return first_exception({each.global_rank: Path(files[each.local_rank]) for each in self._worker_group.workers})

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        cause = self.first_exception() or "A rank failed."
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
        spec = WorkerSpec(
            role="default",
            local_world_size=processes,
            entrypoint=_run,
            args=(function, *args),
            rdzv_handler=rendezvous,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
        )
        agent = _ForkedAgent(spec, folder, log_line_prefix_template)
        try:
            result: RunResult | None = agent.run()
        finally:
            leave(rendezvous)
            signals.restore()  # torch takes them over when it starts processes, and a notebook goes on after the call
        if result is not None and result.is_failed():
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            how = f"Rank {rank} failed first, with exit code {failure.exitcode}: {failure.message}"
            raise NotebookRankError(agent.first_exception() or how, result.failures)
