"""What was found of the memory of training, as a table, as JSON and as a drawing."""

import json
from collections.abc import Sequence

from accel_bigmodel.device_map.drawing import Bar, Segment, draw_bars
from accel_bigmodel.training.prediction import PURPOSES, TrainingMemory
from accel_core.modules.sizes import written_size

__all__ = ["described", "svg", "table", "to_json"]


def described(found: TrainingMemory) -> str:
    """Return the layout in words."""
    return f"{found.layout}{', checkpointing' if found.checkpointing else ''}"


def table(rows: Sequence[TrainingMemory], limit: int | None = None) -> str:
    """Draw a line for each layout: its ranks, what the bytes of a rank are for at the peak, and the peak."""
    shown = [purpose for purpose in PURPOSES if any(row.at_peak[purpose] for row in rows)]
    lines = [["layout", "ranks", *shown, "peak", *(["fits"] if limit is not None else [])]]
    for row in rows:
        fits = [] if limit is None else ["yes" if row.peak <= limit else "no"]
        sizes = [written_size(row.at_peak[purpose]) for purpose in shown]
        lines.append([described(row), str(row.ranks), *sizes, written_size(row.peak), *fits])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    drawn = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    ]
    return "\n".join([drawn[0], "  ".join("-" * width for width in widths), *drawn[1:]])


def to_json(rows: Sequence[TrainingMemory], limit: int | None = None, chosen: TrainingMemory | None = None) -> str:
    """Write what was found as JSON: bytes at the peak and at most, by purpose."""
    document = {
        "limit": limit,
        "chosen": None if chosen is None else chosen.to_json(),
        "layouts": [row.to_json() for row in rows],
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
    return Bar(row.layout, note, tuple(segments))
