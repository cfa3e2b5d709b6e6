"""What a verification found, as data and for a person."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from accel_launch.terminal import colors_wanted, paint
from accel_verify.parallel.comparison import Finding, Largest, Tolerance
from accel_verify.parallel.records import RecordedRun

_KINDS = {"equal": "good", "differs": "error", "not comparable": "warning", "refused": "warning", "failed": "error"}
_SHOWN = 5


@dataclass(frozen=True)
class Numbers:
    """What a run measured."""

    loss: list[float]
    gradient_norm: list[float]  # before they were clipped
    weight_norm: list[float]
    memory: list[int]  # the most bytes that each rank held


@dataclass(frozen=True)
class Verdict:
    """What became of one layout.

    Attributes:
        layout: Its name.
        ranks: Number of processes.
        parts: Into how many parts the data is split; one process read them all.
        numbers: What was measured.
        state: `equal`, `differs`, `not comparable` (ranks draw random numbers of their own, or without a seed, which
            may be why it differs), `refused` (the strategy does not train this script) or `failed`.
        message: Why it was refused or failed, or is not comparable.
        findings: What differs, in the order in which it appears.
        largest: The largest difference of the weights after the last step.
        note: What the script raised after its last step.
        note_of_one: Whether it raised such an error on one process too.
        log: The last lines that the rank printed that failed.
    """

    layout: str
    ranks: int
    parts: int
    numbers: Numbers
    state: str
    message: str
    findings: list[Finding] = field(default_factory=list)
    largest: Largest | None = None
    note: str | None = None
    note_of_one: bool = False
    log: str = ""

    def __str__(self) -> str:
        """Return one line: the verdict, and what differs first."""
        if self.state == "equal":
            return f"{self.layout} equals one process"
        if self.state == "differs":
            return f"{self.layout} differs: {self.findings[0]}"
        return f"{self.layout} {'failed' if self.state == 'failed' else f'is {self.state}'}: {self.message}"


@dataclass(frozen=True)
class Report:
    """What became of all layouts."""

    target: str
    steps: int
    tolerance: Tolerance
    one_process: Mapping[int, Numbers]
    verdicts: list[Verdict]

    @property
    def equal(self) -> bool:
        """Whether every layout equals one process."""
        return all(verdict.state == "equal" for verdict in self.verdicts)


def run_as_numbers(run: RecordedRun) -> Numbers:
    """Return what a run measured."""
    steps = range(1, len(run.steps) + 1)
    return Numbers(
        [run.loss(step) for step in steps],
        [run.norm(step, "gradients") for step in steps],
        [run.norm(step, "weights") for step in steps],
        run.memory,
    )


def print_report(report: Report, *, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        print(json.dumps(_finite({**asdict(report), "equal": report.equal}), indent=2, allow_nan=False))
        return
    colors = colors_wanted(sys.stdout)
    near = report.tolerance
    print(
        f"{report.target}: {report.steps} optimizer steps in {near.format}; losses agree within {near.loss:g}, "
        f"gradients within {near.gradient:g} (later {near.at(2).gradient:g}), updates within {near.update:g} "
        f"(later {near.at(2).update:g})"
    )
    rows = list(_rows(report))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        print(paint(line, "heading", colors) if number == 0 else line)
    print()
    for verdict in report.verdicts:
        _print_verdict(verdict, colors)


def _finite(value: object) -> object:
    """Return a nest in which numbers that JSON does not have are words."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN


def _rows(report: Report) -> Iterator[tuple[str, ...]]:
    yield "layout", "step", "loss", "gradient norm", "weight norm", "memory per rank"
    shown = set()
    for verdict in report.verdicts:
        if verdict.parts not in shown:
            shown.add(verdict.parts)
            name = f"one process, {verdict.parts} batches as one" if verdict.parts > 1 else "one process"
            yield from _rows_of(name, report.one_process[verdict.parts])
        yield from _rows_of(verdict.layout, verdict.numbers)


def _rows_of(name: str, numbers: Numbers) -> Iterator[tuple[str, ...]]:
    memory = f"{max(numbers.memory) / 2**20:.0f} MiB" if numbers.memory else "-"
    if not numbers.loss:
        yield name, "-", "-", "-", "-", memory
    columns = zip(numbers.loss, numbers.gradient_norm, numbers.weight_norm, strict=True)
    for step, measured in enumerate(columns, 1):
        first, last = (name, memory) if step == 1 else ("", "")
        yield first, str(step), *(f"{value:.6g}" for value in measured), last


def _print_verdict(verdict: Verdict, colors: bool) -> None:
    print(paint(str(verdict), _KINDS[verdict.state], colors))
    for finding in verdict.findings[verdict.state == "differs" : _SHOWN]:
        print(f"  then {finding}")
    if len(verdict.findings) > _SHOWN:
        print(f"  and {len(verdict.findings) - _SHOWN} more; --json shows all")
    if verdict.largest is not None:
        print(f"  largest difference of weights: {verdict.largest.value:.2g} in {verdict.largest.where}")
    if verdict.note is not None:
        print(f"  after the last step, the script raised {verdict.note}")
    if verdict.log:
        print("\n".join(f"  | {line}" for line in verdict.log.splitlines()))
