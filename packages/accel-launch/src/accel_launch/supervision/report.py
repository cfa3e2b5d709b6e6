"""What is said when a run failed: for a person on the terminal, and for a machine as JSON."""

import json
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_launch.supervision.outcome import Ending, first_failure, want_restart
from accel_launch.supervision.streams import RankLog
from accel_launch.terminal import colours_wanted, paint

__all__ = ["failure_record", "report_failure", "report_left_behind"]


def report_left_behind(pids: Sequence[int]) -> None:
    """Say which processes outlived the ranks that started them, and were ended.

    Args:
        pids: Process ids.
    """
    told = ", ".join(map(str, pids))
    print(f"accel launch: ended processes that outlived their ranks: {told}", file=sys.stderr, flush=True)


def failure_record(
    endings: Sequence[Ending], *, run_id: str, command: Sequence[str], seconds: float, reason: str, attempt: int = 0
) -> dict[str, Any]:
    """Return the record of a failure.

    Args:
        endings: How the processes of this machine ended.
        run_id: Name of the run.
        command: Command line of the processes.
        seconds: Seconds between start and end.
        reason: "failure", "watchdog" or a signal's name.
        attempt: How often the processes had been started again.

    Returns:
        A JSON object; `first` is the rank that failed first, `ranks` how each ended.
    """
    first = first_failure(endings)
    return {
        "schema": 1,
        "run_id": run_id,
        "host": socket.gethostname(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(command),
        "seconds": round(seconds, 3),
        "reason": reason,
        "attempt": attempt,
        "first": None if first is None else first.rank,
        "ranks": [
            {
                "rank": ending.rank,
                "local_rank": ending.local_rank,
                "pid": ending.pid,
                "exit_code": ending.status if ending.status >= 0 else None,
                "signal": -ending.status if ending.status < 0 else None,
                "how": ending.how,
                "stopped_by_launcher": ending.stopped,
                "out_of_memory": ending.out_of_memory,
                "traceback": ending.traceback,
            }
            for ending in endings
        ],
    }


def report_failure(
    endings: Sequence[Ending],
    logs: Mapping[int, RankLog],
    record: Mapping[str, Any],
    *,
    log_dir: Path | None,
    quiet: bool = False,
) -> Path | None:
    """Write the record and the logs of a failure, and tell a person about it; the traceback comes last.

    Args:
        endings: How the processes of this machine ended.
        logs: Record of each rank.
        record: What `failure_record` returned.
        log_dir: Folder with full logs, or None: then what is remembered of each rank goes to a temporary folder.
        quiet: Write the files, print nothing.

    Returns:
        The record's path, or None where no folder could be written.
    """
    folder = log_dir
    try:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="accel-failure-"))
            for log in logs.values():
                (folder / f"rank{log.rank}.stderr.log").write_bytes(bytes(log.tail))
        path = folder / "failure.json"
        path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        print(f"accel launch: the record of the failure could not be written: {error}", file=sys.stderr)
        folder = path = None
    if not quiet:
        sys.stdout.flush()
        print(
            _summary(endings, folder, path, float(record["seconds"]), str(record["reason"])),
            file=sys.stderr,
            flush=True,
        )
    return path


def _summary(endings: Sequence[Ending], folder: Path | None, path: Path | None, seconds: float, reason: str) -> str:
    colours = colours_wanted(sys.stderr)
    first = first_failure(endings)
    title = {
        "failure": "the run ended early" if want_restart(endings) else "the run failed",
        "watchdog": "no rank made progress, the run was ended",
    }.get(reason, f"stopped by {reason}")
    lines = ["", f"{paint('accel launch:', 'error', colours)} {title} after {seconds:.1f} s"]
    for ending in endings:
        word = "stopped by the launcher" if ending.stopped else "ended well" if ending.status == 0 else ending.how
        note = "  <- first" if first is not None and ending.rank == first.rank and len(endings) > 1 else ""
        lines.append(f"  rank {ending.rank}  pid {ending.pid}  {word}{paint(note, 'error', colours)}")
    if folder is not None and first is not None:
        lines.append(f"  log of rank {first.rank}: {folder / f'rank{first.rank}.stderr.log'}")
    if path is not None:
        lines.append(f"  record: {path}")
    if want_restart(endings):
        lines.append(f"Every rank left with exit code {endings[0].status}, to be tried again: start the run again.")
    elif first is not None:
        lines.append(paint(f"Rank {first.rank} failed first: {first.how}.", "error", colours))
        if first.traceback:
            lines.append(first.traceback)
    return "\n".join(lines)
