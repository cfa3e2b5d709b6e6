"""What was found of the memory of training, as a table, as JSON and as a drawing."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from accel_core.modules.sizes import written_size
from accel_plan.drawing import Segment, draw_bars
from accel_plan.output import draw_table
from accel_plan.training.pipelined import PipelinePlan
from accel_plan.training.prediction import PURPOSES, TrainingMemory

__all__ = ["described", "pipelines", "svg", "table", "to_json"]


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
    lines = [["rank", "blocks", "work", *shown, "peak"]]
    for rank, (at_peak, peak) in enumerate(zip(plan.at_peak, plan.peaks, strict=True)):
        stages = [stage for stage, other in enumerate(plan.ranks) if other == rank]
        blocks = ", ".join(_span(*plan.blocks[stage]) for stage in stages)
        work = sum(plan.work[stage] for stage in stages)
        lines.append([str(rank), blocks, f"{work:.1%}", *(written_size(at_peak[each]) for each in shown)])
        lines[-1].append(written_size(peak))
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
    bars = []
    for row in rows:
        segments = [Segment(purpose, count, purpose) for purpose, count in row.at_peak.items() if count]
        if limit is not None and row.peak < limit:
            segments.append(Segment("free", limit - row.peak, "free"))
        bars.append((f"{described(row)}: {written_size(row.peak)} on each rank of {row.ranks}", segments))
    return draw_bars(title, bars)
