"""What was found of the memory of training, as a table, as JSON and as a drawing."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from accel_core.modules.sizes import written_size
from accel_plan.drawing import draw_bars
from accel_plan.output import draw_table
from accel_plan.training.pipelined import PipelinePlan
from accel_plan.training.prediction import PURPOSES, TrainingMemory


def described(found: TrainingMemory) -> str:
    """Return the layout in words."""
    schedule = "" if found.pipeline is None else f", {found.pipeline.schedule}"
    return f"{found.layout}{schedule}{', checkpointing' if found.checkpointing else ''}"


def table(rows: Sequence[TrainingMemory], limit: int | None = None) -> str:
    """Draw a line for each layout: its ranks, what the bytes of a rank are for at the peak, and the peak."""
    shown = [purpose for purpose in PURPOSES if any(row.at_peak[purpose] for row in rows)]
    lines = [["layout", "ranks", *shown, "peak", *(["fits"] if limit is not None else [])]]
    for row in rows:
        fits = [] if limit is None else ["yes" if row.peak <= limit else "no"]
        sizes = [written_size(row.at_peak[purpose]) for purpose in shown]
        lines.append([described(row), str(row.ranks), *sizes, written_size(row.peak), *fits])
    return draw_table(lines)


def pipelines(rows: Sequence[TrainingMemory]) -> str:
    """Draw for each pipeline what its stages have, and how long its ranks wait."""
    return "\n\n".join(_stages(described(row), row.pipeline) for row in rows if row.pipeline is not None)


def _stages(name: str, plan: PipelinePlan) -> str:
    shown = [purpose for purpose in PURPOSES if any(each[purpose] for each in plan.at_peak)]
    lines = [["rank", "blocks", *shown, "peak"]]
    for rank, (at_peak, peak) in enumerate(zip(plan.at_peak, plan.peaks, strict=True)):
        spans = zip(plan.ranks, plan.blocks, strict=True)
        blocks = ", ".join(_span(*span) for other, span in spans if other == rank)
        lines.append([str(rank), blocks, *(written_size(at_peak[each]) for each in shown), written_size(peak)])
    text = f"{name}, {plan.microbatches} micro-batches: ranks wait for {plan.bubble:.1%} of a step.\n\n"
    return text + draw_table(lines)


def _span(first: str, last: str) -> str:
    """Return the names of blocks that follow one another: "layers.0 to 3"."""
    folder, _, number = last.rpartition(".")
    short = number if folder == first.rpartition(".")[0] else last
    return first if first == last else f"{first} to {short}"


def to_json(rows: Sequence[TrainingMemory], limit: int | None = None, chosen: TrainingMemory | None = None) -> str:
    """Write what was found as JSON: bytes at the peak and at most, by purpose."""
    document = {
        "limit": limit,
        "chosen": None if chosen is None else asdict(chosen),
        "layouts": [asdict(row) for row in rows],
    }
    return json.dumps(document, indent=2) + "\n"


def svg(title: str, rows: Sequence[TrainingMemory], limit: int | None = None) -> str:
    """Draw a bar for each layout, with what the bytes of a rank are for at the peak."""
    bars = {}
    for row in rows:
        parts = {purpose: count for purpose, count in row.at_peak.items() if count}
        if limit is not None and row.peak < limit:
            parts["free"] = limit - row.peak
        bars[f"{described(row)}: {written_size(row.peak)} on each rank of {row.ranks}"] = parts
    return draw_bars(title, bars)
