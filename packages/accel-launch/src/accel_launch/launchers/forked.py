"""Processes forked from this one, for functions that no other process can import."""

import functools
import json
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessException, start_processes

from accel_core.errors import LaunchError
from accel_core.host.environ import text, write
from accel_launch.supervision.orphans import RUN_VARIABLE, kill_orphans
from accel_launch.supervision.report import report_left_behind

__all__ = ["run_forked", "run_spawned"]


class _Forked:
    """The ranks that are forked for one call: their exceptions, and what they leave behind.

    torch tells about one rank that failed, and that is often one whose partner was gone. Every rank therefore notes its
    own exception with its time. A rank also puts the run's mark into its environment, by which processes that it starts
    are found afterwards; the environment of this process, which may start others meanwhile, is left alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run_id = uuid.uuid4().hex

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its exceptions noted."""

        @functools.wraps(function, assigned=("__module__", "__doc__"))
        def run(*args: object) -> Any:
            write(RUN_VARIABLE, self._run_id)
            try:
                return function(*args)
            except BaseException:
                self._note(traceback.format_exc())
                raise

        return run

    def _note(self, told: str) -> None:
        attempt, rank = int(text("TORCHELASTIC_RESTART_COUNT") or 0), int(text("RANK") or 0)
        note = {"attempt": attempt, "when": time.monotonic(), "rank": rank, "traceback": told}
        (self._folder / f"{attempt}-{rank}.json").write_text(json.dumps(note))

    def first_exception(self) -> tuple[int, str] | None:
        """Return the rank that raised first in the last attempt, and its traceback; None where none raised."""
        notes = [json.loads(path.read_text()) for path in self._folder.iterdir()]
        if not notes:
            return None
        last = max(note["attempt"] for note in notes)
        first = min((note for note in notes if note["attempt"] == last), key=lambda note: float(note["when"]))
        return int(first["rank"]), str(first["traceback"])

    def end_what_is_left(self) -> None:
        """End processes that outlived the ranks that started them."""
        left = kill_orphans(self._run_id)
        if left:
            report_left_behind(left)


@contextmanager
def _forked() -> Iterator[_Forked]:
    with tempfile.TemporaryDirectory(prefix="accel-forked-") as folder:
        forked = _Forked(Path(folder))
        try:
            yield forked
        finally:
            forked.end_what_is_left()


def run_forked(function: Callable[..., Any], args: Sequence[Any], **settings: Any) -> None:
    """Run a function in processes forked under torch's elastic agent.

    Args:
        function: The function.
        args: Its arguments.
        **settings: Those of torch's `LaunchConfig`.

    Raises:
        LaunchError: A process failed; the message ends with the traceback of the one that failed first.
    """
    config = LaunchConfig(start_method="fork", **settings)
    with _forked() as forked:
        try:
            elastic_launch(config, forked.watched(function))(*args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message: object = failure.message
            if isinstance(message, dict):
                message = message.get("extraInfo", {}).get("py_callstack") or message.get("message")
            raised = forked.first_exception()
            if raised is not None:
                raise LaunchError(f"Rank {raised[0]} failed first, with an exception:\n{raised[1]}") from None
            raise LaunchError(f"Rank {rank} failed first, with exit code {failure.exitcode}:\n{message}") from None


def run_spawned(function: Callable[..., Any], args: Sequence[Any], processes: int) -> None:
    """Run a function in processes forked without an agent.

    Args:
        function: The function; it gets the number of its process first.
        args: Its further arguments.
        processes: Number of processes.

    Raises:
        LaunchError: A process failed; the message ends with the traceback of the one that failed first.
    """
    with _forked() as forked:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                forked.watched(function), args=tuple(args), nprocs=processes, start_method="fork"
            )
        except ProcessException as error:
            rank, told = forked.first_exception() or (error.error_index, str(error))
            raise LaunchError(f"Rank {rank} failed first: {told}") from None
