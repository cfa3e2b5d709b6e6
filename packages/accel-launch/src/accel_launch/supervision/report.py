"""The report of a failed run: for a person on the terminal, and for a machine as JSON."""

import json
import re
import resource
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_launch.settings.reading import shortened
from accel_launch.supervision.logs import RECORD
from accel_launch.supervision.outcome import ExitOutcome, cause_of, first_failure, want_restart, without_crash
from accel_launch.supervision.streams import RankLog
from accel_launch.terminal import colors_wanted, paint, say

_NOT_A_STACK = re.compile(r"^(?:Fatal Python error: Aborted\n+|Extension modules: .*\n?)", re.MULTILINE)
"""What Python prints around stacks, because it treats the signal that asks for them as a crash."""


def report_left_behind(pids: Sequence[int]) -> None:
    """Print which processes outlived the ranks that started them and were ended."""
    say(f"accel launch: ended processes that outlived their ranks: {', '.join(map(str, pids))}")


def failure_record(
    outcomes: Sequence[ExitOutcome],
    *,
    run_id: str,
    command: Sequence[str],
    seconds: float,
    reason: str,
    attempt: int = 0,
) -> dict[str, Any]:
    """Return the record of a failure."""
    first = first_failure(outcomes)
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
                "rank": outcome.rank,
                "local_rank": outcome.local_rank,
                "pid": outcome.pid,
                "exit_code": outcome.status if outcome.status >= 0 else None,
                "signal": -outcome.status if outcome.status < 0 else None,
                "how": outcome.how,
                "stopped_by_launcher": outcome.stopped,
                "out_of_memory": outcome.out_of_memory,
                "traceback": outcome.traceback,
            }
            for outcome in outcomes
        ],
    }


def report_failure(
    outcomes: Sequence[ExitOutcome],
    logs: Mapping[int, RankLog],
    record: Mapping[str, Any],
    message: str,
    *,
    log_dir: Path | None,
    quiet: bool = False,
    early: str = "",
) -> Path | None:
    """Write the record and the logs of a failure, and tell a person about it; the traceback comes last."""
    path = _write_record(record, {}, log_dir) if log_dir is not None else None
    path = path or _write_record(record, logs, None)  # the folder's disk may be full
    if not quiet:
        say(_summary(outcomes, record, path, message, early))
    return path


def report_restart(outcomes: Sequence[ExitOutcome], message: str, attempt: int, most: int) -> None:
    """Print that the ranks are restarted, and why."""
    first = first_failure(outcomes)
    if first is not None:
        named = f"rank {first.rank} failed first: {first.how}; all ranks start again (restart {attempt} of {most})"
        colors = colors_wanted(sys.stderr)
        say(f"{paint('accel launch:', 'warning', colors)} {named}{_below(message)}")


def report_stacks(rank: int, printed: bytes) -> None:
    """Show the stacks that the processes of a rank printed when the watchdog ended it."""
    text = printed.decode(errors="replace").replace("\r\n", "\n")
    stacks = _NOT_A_STACK.sub("", text).strip("\n")
    say(f"\nStacks of rank {rank}:\n{stacks or 'it printed none before it ended'}")


def pass_on(text: str) -> None:
    """Show what a process printed around its traceback."""
    kept = without_crash(text).strip("\n")
    if kept:
        say(kept)


def report_card(facts: Mapping[str, Any], seconds: float, script: str) -> None:
    """Show in at most five lines how a run went, from what its ranks recorded."""
    lines = [f"accel launch: the run ended after {seconds:.1f} s"]
    if facts.get("samples") and facts.get("seconds"):
        share = min(float(facts.get("waited", 0.0)) / facts["seconds"], 1.0)
        rate = facts["samples"] / facts["seconds"]
        lines.append(
            f"  speed       {rate:,.{0 if rate >= 100 else 2}f} samples/s on all ranks together, "
            f"{share:.0%} of the time waiting for data"
            + (f", {facts['mfu']:.1%} of peak FLOP/s" if "mfu" in facts else "")
        )
    # In bytes on macOS, in KiB elsewhere.
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    device = f"; {facts['device_bytes'] / 2**30:.2f} GiB on the device" if facts.get("device_bytes") else ""
    lines.append(f"  memory      {largest / 2**30:.2f} GiB in the largest process{device}")
    if facts.get("checkpoint"):
        lines.append(f"  checkpoint  {facts['checkpoint']}")
        if script in sys.argv:
            program = Path(sys.argv[0]).name
            words = ["accel" if program == "__main__.py" else program, *sys.argv[1:]]
            resuming = _resuming(words, script, str(facts["checkpoint"]))
            lines += [f"  resume      {shlex.join(resuming)}"] if resuming else []
    say("\n".join(lines))


def _resuming(words: Sequence[str], script: str, checkpoint: str) -> Sequence[str]:
    """Return the command line that resumes a run from its checkpoint; an empty one if the script's text shows none."""
    path = Path(script)
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.search(r"[\"'](--resume(?:[-_]from[-_]checkpoint)?)[\"']([^)]*(?:store_true|is_flag))?", text)
    if found is None:
        return words if "load_state(" in text else ()
    flag, bare = found.groups()
    at = next((place for place, word in enumerate(words) if word.partition("=")[0] == flag), len(words))
    rest = words[at + 1 :] if bare or "=" in "".join(words[at : at + 1]) else words[at + 2 :]
    return [*words[:at], flag, *([] if bare else [checkpoint]), *rest]


def _below(message: str) -> str:
    return f"\n{message}" if message else ""


def _write_record(record: Mapping[str, Any], logs: Mapping[int, RankLog], folder: Path | None) -> Path | None:
    try:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="accel-failure-"))
        path = folder / RECORD
        path.write_text(json.dumps(record, indent=2) + "\n")
        for log in logs.values():
            (folder / f"rank{log.rank}.stderr.log").write_bytes(bytes(log.tail))
    except OSError as error:
        say(f"accel launch: the record of the failure cannot be written; {folder} gives: {error.strerror}.")
        return None
    return path


def _summary(
    outcomes: Sequence[ExitOutcome], record: Mapping[str, Any], path: Path | None, message: str, early: str
) -> str:
    reason = str(record["reason"])
    colors = colors_wanted(sys.stderr)
    first, cause = first_failure(outcomes), cause_of(outcomes)
    caused_here = not reason.startswith("another machine")
    title = {
        "failure": "the run ended early" if want_restart(outcomes) else "the run failed",
        "watchdog": "no rank made progress, the run was ended",
    }.get(reason, f"stopped by {reason}")
    lines = ["", f"{paint('accel launch:', 'error', colors)} {title} after {record['seconds']:.1f} s"]
    if reason == "SIGINT" and (cause is None or cause.fault.endswith("KeyboardInterrupt")):  # of a person: no failure
        return lines[1]
    for outcome in outcomes:
        word = "stopped by the launcher" if outcome.stopped else "exited with 0" if outcome.status == 0 else outcome.how
        note = (
            "  <- first"
            if first is not None and outcome.rank == first.rank and len(outcomes) > 1 and caused_here and not early
            else ""
        )
        if outcome.traceback and outcome is not cause:
            word += f", {shortened(outcome.fault)}"
        lines.append(f"  rank {outcome.rank}  pid {outcome.pid}  {word}{paint(note, 'error', colors)}")
    if path is not None:
        lines += [f"  log of rank {first.rank}: {path.parent / f'rank{first.rank}.stderr.log'}"] if first else []
        lines.append(f"  record: {path}")
    if want_restart(outcomes):
        lines.append(f"Every rank exited with {outcomes[0].status} and asks to be restarted: start the run again.")
    elif first is not None and caused_here:
        lines.append(paint(early or f"Rank {first.rank} failed first: {first.how}.", "error", colors))
    return "\n".join(lines) + _below(message)
