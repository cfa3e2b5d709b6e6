"""What `accel try` does: verify on two ranks, time one process, and say how to launch."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_core.errors import LaunchError
from accel_core.host import environ
from accel_core.host.program.run_module import own_command
from accel_core.modules.sizes import written_size
from accel_launch.settings.devices import count_gpus
from accel_launch.terminal import colors_wanted, paint, progress
from accel_verify.diagnosis.variables import without_settings
from accel_verify.parallel.layouts import requested_layout
from accel_verify.parallel.report import Verdict
from accel_verify.parallel.run import variables_of, verify_parallel
from accel_verify.ranks import ended_by_sigterm, run_ranks
from accel_verify.trial.gpu import memory_of_gpu

_STEPS = 3
_AT_LEAST_S, _TIMES = 20.0, 6
"""How long ranks may take: so many seconds, and so many times what one process takes for more steps."""


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigurationError: An unknown layout or GPU, or a script that does not exist.
        LaunchError: The script fails on one process, or makes fewer steps.
    """
    gpus = {name.strip(): memory_of_gpu(name.strip()) for name in (args.gpu or "").split(",") if name.strip()}
    layout = requested_layout(args.layout or "dp2")
    # Two ranks do not share a GPU; one process is timed on it all the same.
    on_cpu = not args.cpu and 0 < count_gpus(environ.snapshot()) < layout.ranks
    began = time.monotonic()
    clocked = _clocked(args, min(gpus.values(), default=0))
    quick = min(args.timeout, _AT_LEAST_S + _TIMES * (time.monotonic() - began))
    report = verify_parallel(
        args.script,
        layout.name,
        arguments=args.script_arguments,
        steps=_STEPS,
        cpu=args.cpu or on_cpu,
        mixed_precision=args.mixed_precision,
        timeout=args.timeout if on_cpu else quick,
    )
    (verdict,) = report.verdicts
    # Runs are compared without dropout, so ranks that draw the same masks, as under a Trainer, cause nothing else.
    others = [finding for finding in verdict.findings if finding.kind != "dropout"]
    if verdict.state == "differs":
        verdict = replace(verdict, findings=others or verdict.findings, state="differs" if others else "equal")
    # A fault of its own on both is not a difference.
    good = verdict.state == "equal" and (verdict.note is None or verdict.note_of_one)
    lines = [
        (
            verdict.state if good or verdict.state != "equal" else "failed",
            _equality(verdict, good) + f"; compared on the CPU, as {layout.name} takes {layout.ranks} GPUs" * on_cpu,
        ),
        ("speed", _speed(clocked)),
        *(("memory", _memory(name, nbytes, clocked)) for name, nbytes in gpus.items()),
        ("launch", _launch_line(args, good, min(gpus.values(), default=0), clocked)),
    ]
    kinds = ["good" if good else "error", *["heading"] * len(lines)]
    for kind, (word, text) in zip(kinds, lines, strict=False):
        print(f"{paint(word.ljust(14), kind, colors_wanted(sys.stdout))} {text}")
    return 0 if good else 1


def _equality(verdict: Verdict, good: bool) -> str:
    """Say whether ranks train as one process does."""
    if good:
        text = f"{_STEPS} optimizer steps on one process and on {verdict.layout}: losses, gradients and weights agree"
        return "".join([text, *(f"; {finding.kind}: {finding.text}" for finding in verdict.findings[:1])])
    after = f"{_STEPS} steps on {verdict.layout} are equal; after them the script raised {verdict.note}"
    return "\n  | ".join([after if verdict.state == "equal" else str(verdict), *verdict.log.splitlines()])


def _clocked(args: argparse.Namespace, limit: int) -> dict[str, Any]:
    """Run the script on one process and time it; raise a LaunchError if it fails there."""
    progress("Timing one process ...")
    words = ["--num-processes", "1"] + (["--cpu"] if args.cpu or not count_gpus(environ.snapshot()) else [])
    words += [] if args.mixed_precision is None else ["--mixed-precision", args.mixed_precision]
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="accel-try-") as folder:
        place = Path(folder)
        environment = without_settings(environ.snapshot()) | variables_of(words, place)
        command = own_command("accel_verify.trial.clock", str(place), str(limit), args.script, *args.script_arguments)
        ended = run_ranks([command], [environment], place, args.timeout)
        if ended.timed_out or ended.failed is not None:
            raise LaunchError(
                f"The script did not finish on one process; got exit code {ended.codes[0]} after:\n{ended.tail(0)}\n"
                "Make it run by itself first."
            )
        found: dict[str, Any] = json.loads((place / "clock.json").read_text())
        return found


def _speed(clocked: dict[str, Any]) -> str:
    if clocked["steps"] < 1 or not clocked["samples"]:
        return "unknown: the script made too few steps with a prepared loader"
    share = clocked["waited"] / clocked["seconds"]
    speed = clocked["samples"] / clocked["seconds"]
    rate = f"{speed:,.{0 if speed >= 100 else 2}f} samples/s on one process"
    advice = "; give the DataLoader (more) workers" if share > 0.2 else ""
    return f"{rate}, {share:.0%} of the time waiting for data{advice}"


def _fitting(clocked: dict[str, Any], nbytes: int) -> dict[str, Any] | None:
    return next((row for row in clocked["memory"] if row["peak"] <= nbytes), None)


def _memory(name: str, nbytes: int, clocked: dict[str, Any]) -> str:
    """Describe how much of a GPU a rank needs, and on how many of them the training fits."""
    if not clocked["memory"]:
        return f"unknown: {clocked['trouble']}"
    # Layouts grow until one fits.
    first, last, fitting = clocked["memory"][0], clocked["memory"][-1], _fitting(clocked, nbytes)
    text = f"{written_size(first['peak'])} of {written_size(nbytes)} on one {name}"
    if fitting is first:
        return text
    row, how = (last, "too much even") if fitting is None else (fitting, "fits")
    return f"{text}; {how} in shards on {row['ranks']} of them ({written_size(row['peak'])} each)"


def _launch_line(args: argparse.Namespace, good: bool, limit: int, clocked: dict[str, Any]) -> str:
    """Return the command that starts the training."""
    fitting = _fitting(clocked, limit) if limit else None
    layout = fitting["layout"] if fitting is not None and fitting["ranks"] > 1 else args.layout
    words = ["--num-processes", "1"]
    if good and layout:
        words = list(requested_layout(layout).words)
    elif good:
        words = [] if limit or count_gpus(environ.snapshot()) else ["--cpu", "--num-processes", "2"]
    words += [] if args.mixed_precision is None else ["--mixed-precision", args.mixed_precision]
    line = shlex.join(["accel", "launch", *words, args.script, *args.script_arguments])
    return line if good else f"{line}, until that is fixed"
