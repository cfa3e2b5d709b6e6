"""Running a script on one process and on layouts of ranks, and comparing what was recorded."""

from __future__ import annotations

import argparse
import inspect
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, LaunchError
from accel_core.host import environ
from accel_core.host.ports import get_free_port
from accel_core.host.program.run_module import own_command
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.settings.child import child_environment
from accel_launch.settings.devices import count_gpus
from accel_launch.terminal import progress
from accel_verify.diagnosis.variables import without_settings
from accel_verify.parallel.comparison import Finding, compare, largest_difference, own_draw, tolerance_of, unseeded
from accel_verify.parallel.draws import cured
from accel_verify.parallel.layouts import RequestedLayout, requested_layouts
from accel_verify.parallel.records import RecordedRun, read_run
from accel_verify.parallel.report import Report, Verdict, print_report, run_as_numbers
from accel_verify.ranks import RanksEnded, ended_by_sigterm, rank_variables, run_ranks
from accel_verify.script_arguments import check_script

_GRACE_S = 30.0
"""How long ranks may go on once one has exited with 0: after its last step, a script may fail on one rank only."""


@dataclass(frozen=True)
class VerifyRequest:
    """What is verified, and how."""

    target: str
    arguments: tuple[str, ...]
    steps: int
    words: tuple[str, ...]  # flags of `accel launch` for all runs
    counts: bool  # `num_processes` of the one process answers with the number of data parts
    timeout: float  # seconds that a run may take
    place: Path  # folder for records


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigurationError: An unknown layout, or a script that does not exist.
        LaunchError: The script fails on one process, or makes fewer steps.
    """
    report = verify_parallel(
        args.script,
        args.layouts,
        arguments=args.script_arguments,
        steps=args.steps,
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dynamo_backend=args.dynamo_backend,
        count_as_ranks=args.count_as_ranks,
        timeout=args.timeout,
    )
    print_report(report, as_json=args.json)
    return 0 if report.equal else 1


def verify_parallel(
    target: str | Callable[[], object],
    layouts: str | Sequence[str],
    *,
    arguments: Sequence[str] = (),
    steps: int = 3,
    cpu: bool = False,
    mixed_precision: str | None = None,
    dynamo_backend: str | None = None,
    count_as_ranks: bool = False,
    timeout: float = 600.0,
) -> Report:
    """Run a script, or a function, on one process and on layouts of ranks, and compare what happens.

    Raises:
        ConfigurationError: An unknown layout, or a script that does not exist.
        LaunchError: The script fails on one process, or makes fewer steps.
    """
    requested = requested_layouts(layouts if isinstance(layouts, str) else ",".join(layouts))
    words = ["--cpu"] if cpu or not count_gpus(environ.snapshot()) else []
    for flag, value in (("--mixed-precision", mixed_precision), ("--dynamo-backend", dynamo_backend)):
        words += [] if value is None else [flag, str(value)]
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="accel-verify-parallel-") as folder:
        request = VerifyRequest(
            _checked(target), tuple(arguments), steps, tuple(words), count_as_ranks, timeout, Path(folder)
        )
        return _verify(request, requested)


def _checked(target: str | Callable[[], object]) -> str:
    """Return where a target is, as the recorder takes it."""
    if callable(target):
        source = inspect.getsourcefile(target)
        if source is None or not target.__qualname__.isidentifier():
            raise ConfigurationError(
                "A function that ranks call is one of a module, found by its name; got "
                f"{target.__qualname__!r}. Define it at the top of a file."
            )
        return f"{source}:{target.__qualname__}"
    check_script(target)
    return target


def _verify(request: VerifyRequest, layouts: Sequence[RequestedLayout]) -> Report:
    """Compare each layout with one process that reads what all its ranks read."""
    ones: dict[int, RecordedRun] = {}
    verdicts = []
    for layout in layouts:
        if layout.parts not in ones:  # layouts with equally many parts share one
            progress("Running on one process ...")
            alone, one = _recorded(request, f"one-{layout.parts}", 1, layout.parts, ())
            check_one_process(request, alone, one)
            ones[layout.parts] = one
        progress(f"Running on {layout.name}, {layout.ranks} ranks ...")
        ended, found = _recorded(request, layout.name, layout.ranks, 0, layout.words)
        verdicts.append(verdict_on(request, layout, ones[layout.parts], ended, found))
    first = next(iter(ones.values()))
    numbers = {parts: run_as_numbers(one) for parts, one in ones.items()}
    return Report(request.target, request.steps, tolerance_of(first), numbers, verdicts)


def check_one_process(request: VerifyRequest, ended: RanksEnded, found: RecordedRun) -> None:
    """Refuse a run on one process that did not make its steps."""
    if len(found.steps) >= request.steps:
        return
    if ended.timed_out:
        raise LaunchError(
            f"The script did not finish its steps on one process in time; got {request.timeout:.3g} s for "
            f"{request.steps} optimizer steps. Pass a longer --timeout, or fewer --steps."
        )
    if ended.failed is not None:
        raise LaunchError(
            f"The script fails on one process; got exit code {ended.codes[0]} after:\n{ended.tail(0)}\n"
            "Make it run by itself first."
        )
    raise LaunchError(
        f"The script ended before the step that was asked for; got {len(found.steps)} optimizer steps of "
        f"{request.steps} with a prepared optimizer. Prepare the optimizer and the training loader, or ask for fewer "
        "--steps."
    )


def verdict_on(
    request: VerifyRequest, layout: RequestedLayout, one: RecordedRun, ended: RanksEnded, found: RecordedRun
) -> Verdict:
    """Return the verdict on a layout."""
    about: dict[str, Any] = {"layout": layout.name, "ranks": layout.ranks, "parts": layout.parts}
    about["numbers"] = run_as_numbers(found)
    if found.refused:
        return Verdict(**about, state="refused", message=found.note or "")
    if len(found.steps) >= request.steps:
        findings, largest = compare(one, found), largest_difference(one, found)
        state, message = _state_of(one, found, findings)
        if state == "not comparable":  # other numbers say nothing about the steps
            findings, largest = [], None
        unended = f"nothing, but did not end{_standing(request, ended)}" if ended.timed_out else None
        note = found.note or unended or one.note
        # By type: texts have numbers.
        of_one = note is not None and one.note is not None and note.split(":")[0] == one.note.split(":")[0]
        about |= {"findings": findings, "largest": largest, "note": note, "note_of_one": of_one}
        return Verdict(**about, state=state, message=message)
    made, log = f"it made {len(found.steps)} of {request.steps} steps", ""
    if ended.timed_out:
        standing = _standing(request, ended)
        message, log = f"{made} in {request.timeout:.3g} s{standing}", "" if standing else ended.tail(0)
    elif ended.failed is None:
        message = f"{made} and ended"
    else:
        message = f"rank {ended.failed}: {ended.tail(ended.failed, 1) or 'it printed nothing'}"
        log = ended.tail(ended.failed)
    return Verdict(**about, state="failed", message=message, log=log)


def _standing(request: VerifyRequest, ended: RanksEnded) -> str:
    """Return the line of the script at which each rank was when the time was over, as far as stacks show it."""
    name = Path(request.target.partition(".py:")[0]).stem + ".py"
    frame = re.compile(rf'File "[^"]*{re.escape(name)}", line (\d+)')
    stood = [
        frame.search(ended.tail(rank, 200).rpartition("Fatal Python error")[2]) for rank in range(len(ended.codes))
    ]
    found = [f"rank {rank} at {name}:{line[1]}" for rank, line in enumerate(stood) if line]
    found += [f"rank {rank} had ended" for rank, code in enumerate(ended.codes) if code == 0]
    return f"; {', '.join(found)}. Is there a call that only some ranks make?" if any(stood) else ""


def _state_of(one: RecordedRun, found: RecordedRun, findings: Sequence[Finding]) -> tuple[str, str]:
    """Return the state of a layout that made all steps, and the reason."""
    if not findings:
        return "equal", ""
    calls, own = unseeded(one, found, findings[0].step), own_draw(one, found, findings[0].step)
    if not (calls or own) or any(finding.certain for finding in findings):
        return "differs", ""
    if calls:
        return "not comparable", cured(calls)
    remedy = "Draw them per sample; or draw them for all ranks from one seed, and let each rank use its part."
    return "not comparable", f"{own}. {remedy}"


def _recorded(
    request: VerifyRequest, name: str, size: int, parts: int, words: Sequence[str]
) -> tuple[RanksEnded, RecordedRun]:
    """Run the script on ranks with the recorder, and read what that wrote."""
    place = request.place / name
    place.mkdir()
    environment = without_settings(environ.snapshot()) | variables_of(
        [*request.words, *(words or ["--num-processes", "1"])], place
    )
    words = [str(place), str(request.steps), str(parts), str(int(request.counts)), request.target, *request.arguments]
    environment["NVIDIA_TF32_OVERRIDE"] = "0"  # else convolutions round to 10 bits, by torch's default
    port = get_free_port()
    ended = run_ranks(
        [own_command("accel_verify.parallel.recorder", *words)] * size,
        [environment | rank_variables(rank, size, port) for rank in range(size)],
        place,
        request.timeout,
        _GRACE_S,
    )
    return ended, read_run(place)


def variables_of(words: Sequence[str], place: Path) -> dict[str, str]:
    """Return the variables that `accel launch` would set for some flags, whatever its configuration file says."""
    empty = place / "empty.yaml"
    empty.write_text("compute_environment: LOCAL_MACHINE\n")
    return child_environment(settings_from(launch_command_parser().parse_args(["--config-file", str(empty), *words])))
