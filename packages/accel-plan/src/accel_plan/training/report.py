"""What was found of the memory of training, as a table, as JSON and as a drawing."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from accel_core.modules.sizes import written_size
from accel_plan.drawing import Bar, Segment, draw_bars
from accel_plan.output import draw_table
from accel_plan.training.pipelined import PipelinePlan
from accel_plan.training.prediction import PURPOSES, TrainingMemory

__all__ = ["described", "explained", "pipelines", "svg", "table", "to_json"]


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
    """Draw for each pipeline what its stages have, and how long its ranks wait under each schedule."""
    found = [(row, row.pipeline) for row in rows if row.pipeline is not None]
    parts = [_stages(described(row), plan) for row, plan in found]
    last: dict[str, PipelinePlan] = {row.layout: plan for row, plan in found}  # of a layout, waits are alike
    return "\n\n".join([*parts, *(_bubbles(layout, plan) for layout, plan in last.items())])


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
    text += draw_table(lines)
    if plan.even_work < max(plan.work) - 0.0005:
        split = ",".join(plan.even)
        text += f"\n\nWith --split {split} the largest stage has {plan.even_work:.1%} of the work"
        text += f" instead of {max(plan.work):.1%}."
    return text


def _span(first: str, last: str) -> str:
    """Return the names of blocks that follow one another: "layers.0 to 3"."""
    folder, _, number = last.rpartition(".")
    short = number if folder == first.rpartition(".")[0] else last
    return first if first == last else f"{first} to {short}"


def _bubbles(layout: str, plan: PipelinePlan) -> str:
    counts = sorted({parts for found in plan.bubbles.values() for parts in found})
    lines = [[f"{layout}, micro-batches", *map(str, counts)]]
    for schedule, found in plan.bubbles.items():
        lines.append([schedule, *(f"{found[parts]:.1%}" if parts in found else "-" for parts in counts)])
    return f"The part of a step in which ranks wait:\n\n{draw_table(lines)}"


def explained(rows: Sequence[TrainingMemory]) -> str:
    """Draw for each pipeline what crosses its cuts, and which ranks hold what is outside of blocks."""
    return "\n\n".join(_explained(described(row), row.pipeline) for row in rows if row.pipeline is not None)


def _explained(name: str, plan: PipelinePlan) -> str:
    lines = [["before", "what", "shape", "dtype", "bytes"]]
    for each in plan.crossing:
        shape = "x".join(map(str, each.shape))
        what = f"output {each.place} of {each.made_by}"
        lines.append([each.before, what, shape, each.dtype, written_size(each.nbytes)])
    held = [["outside of blocks", "ranks"]]
    held += [[parameter, ", ".join(map(str, ranks))] for parameter, ranks in plan.holders.items()]
    text = f"{name}: what crosses each cut, for each micro-batch; gradients come back:\n\n{draw_table(lines)}"
    return f"{text}\n\n{draw_table(held)}" if plan.holders else text


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
    return draw_bars(title, [_bar(row, limit) for row in rows])


def _bar(row: TrainingMemory, limit: int | None) -> Bar:
    segments = [
        Segment(purpose, row.at_peak[purpose], purpose, f"{purpose}: {written_size(row.at_peak[purpose])}")
        for purpose in PURPOSES
        if row.at_peak[purpose]
    ]
    note = f"{row.ranks} {'rank' if row.ranks == 1 else 'ranks'}, {written_size(row.peak)} each"
    if row.checkpointing:
        note += ", activations computed again"
    if limit is not None and row.peak < limit:
        segments.append(Segment("free", limit - row.peak, "free", f"free: {written_size(limit - row.peak)}"))
    if limit is not None and row.peak > limit:
        note += f": {written_size(row.peak - limit)} too much"
    if row.pipeline is not None:
        note += f", on the rank that needs most, {row.pipeline.schedule}"
    return Bar(row.layout, note, tuple(segments))
