"""Plots of what was measured, drawn from the tables of benchmarks/RESULTS.md while the site is built."""

from __future__ import annotations

import re
from typing import NamedTuple

import drawing

_SECTION = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- end of \1 -->\n", re.DOTALL)
_VALUE = re.compile(r"([+-]?[\d,]*\.?\d+) *(ns|µs|ms|s|%)?(?![\w.])")
_MS = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3}


class Plot(NamedTuple):
    """What is drawn of the table of a section.

    Attributes:
        title: What is measured, and in which unit.
        columns: Heads of the columns to draw, each with the name of its series; a number chooses among equal heads.
        rows: A pattern for the names of the rows to draw.
        logarithmic: Whether values are of different orders.
    """

    title: str
    columns: dict[str | int, str]
    rows: str = ""
    logarithmic: bool = False


PEER = "accelerate 1.15.0"

PLOTS = {
    "step": Plot("added to a training step, µs", {"added per step, µs": ""}),
    "ddp": Plot("throughput, part of hand-written DDP", {"÷ hand-written DDP": ""}),
    "gather": Plot("added to 64 tensors one by one, ms", {3: "accel", 5: PEER}),
    "loader": Plot("added to a batch, µs", {"added per batch, µs": ""}),
    "imports": Plot("import after torch, ms", {"import after torch, ms": ""}),
    "quant": Plot("bytes of weights", {"bytes of weights": ""}),
    "bigmodel": Plot("time, ms", {"accel": "accel", PEER: PEER}, r"empty;|first forward;|ready|warm;|balanced", True),
    "checkpoint": Plot("time, s", {"accel": "accel", "accelerate": PEER}, r"_state, s$"),
    "launch": Plot("time, s", {"accel": "accel", PEER: PEER}, r"help|one process"),
    "trainer": Plot("a step of the Trainer, µs", {"step, µs": ""}),
    "merge": Plot("merging 1 GiB of shards, s", {"accel": "accel", "copy": "copying the same bytes"}, r"^merge"),
    "fsdp": Plot("÷ the same by hand", {"version 2": "FSDP2", "version 1": "FSDP1"}, r"by hand$|: time ÷ full|÷ dcp"),
    "zero": Plot("÷ DeepSpeed by hand", {f"ZeRO {stage}": f"ZeRO {stage}" for stage in (1, 2, 3)}, r"by hand$"),
}
"""What is drawn, by section."""


def added(results: str) -> str:
    """Return the page of results with a plot below each section that has one.

    Raises:
        ValueError: A table has no longer what its plot shows.
    """
    return _SECTION.sub(lambda match: match[0] + _below(match[1], match[2]), results)


def _below(subject: str, section: str) -> str:
    if subject == "scale":
        return _inline(_curves(table(section)))
    return _inline(_bars(subject, PLOTS[subject], table(section))) if subject in PLOTS else ""


def _inline(svg: str) -> str:
    return f'\n<div class="accel-drawing">\n{svg}</div>\n'


def table(section: str) -> list[list[str]]:
    """Return the cells of the first table of a section, row by row, the heads first."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")] for line in lines]
    return [row for row in rows if not set("".join(row)) <= set("-")]


def value_of(cell: str) -> float | None:
    """Return the number at the start of a cell, times in ms where it has a unit of time; None where it has none."""
    found = _VALUE.match(cell)
    return float(found[1].replace(",", "")) * _MS.get(found[2] or "", 1.0) if found else None


def _bars(subject: str, plot: Plot, cells: list[list[str]]) -> str:
    heads, *rows = cells
    places = {key if isinstance(key, int) else _place(subject, heads, key): name for key, name in plot.columns.items()}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        values = {name: value_of(row[at]) for at, name in places.items() if at < len(row)}
        known = {name: value for name, value in values.items() if value is not None}
        if known and re.search(plot.rows, row[0]):
            found[row[0].partition(";")[0]] = known
    if not found:
        raise ValueError(f"The plot of the section {subject} shows nothing. Correct PLOTS in docs/site/plots.py.")
    return drawing.bars(plot.title, found, logarithmic=plot.logarithmic)


def _place(subject: str, heads: list[str], head: str) -> int:
    if head not in heads:
        raise ValueError(
            f"The table of the section {subject} has no column {head!r}; got {heads}. Correct PLOTS in "
            "docs/site/plots.py."
        )
    return heads.index(head)


def _curves(cells: list[list[str]]) -> str:
    """Draw one rank's times by the number of ranks."""
    heads, *rows = cells
    sizes = {at: float(head.replace(",", "")) for at, head in enumerate(heads) if head.replace(",", "").isdigit()}
    curves = {}
    for row in rows:
        if row[0].endswith("this rank's time"):
            points = [(size, value_of(row[at])) for at, size in sizes.items()]
            curves[row[0].partition(":")[0]] = [(size, value) for size, value in points if value is not None]
    return drawing.picture(drawing.panel("one rank's time, ms", "ranks", curves, 0, 0), drawing.WIDTH, drawing.HEIGHT)
