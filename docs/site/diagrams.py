"""Diagrams of the site, from texts in docs/site/diagrams/ or from the packages' own metadata.

A text has a line for each row of boxes, and below them a line for each arrow:

    script: your script | store: TCP store, one for the run
    script -> store: who are the others?

A box is `key: text`, with ` / ` between the lines of its text, and a number from 1 to 5 before its key for a color.
"""

from __future__ import annotations

import re
from pathlib import Path

import drawing

FOLDER = Path(__file__).parent / "diagrams"
_ARROW = re.compile(r"(\w+) -> (\w+)(?:: (.*))?$")
_NODE = re.compile(r"([1-5] )?(\w+): (.+)$")


def from_text(name: str) -> str:
    """Return the diagram of a file in docs/site/diagrams/."""
    return of((FOLDER / f"{name}.txt").read_text())


def of(source: str) -> str:
    """Return the diagram of a text.

    Raises:
        ValueError: A line is neither a row of boxes nor an arrow, or an arrow has no box at an end.
    """
    rows, arrows = [], []
    for line in filter(str.strip, source.splitlines()):
        arrow = _ARROW.match(line)
        if arrow:
            arrows.append(drawing.Arrow(arrow[1], arrow[2], arrow[3] or ""))
        else:
            rows.append([_node(part.strip()) for part in line.split(" | ")])
    keys = {node.key for row in rows for node in row}
    loose = {end for arrow in arrows for end in arrow[:2]} - keys
    if loose:
        raise ValueError(f"An arrow leads to no box; got {sorted(loose)}. Name one of {sorted(keys)}.")
    return drawing.diagram(rows, arrows)


def _node(part: str) -> drawing.Node:
    found = _NODE.match(part)
    if not found:
        raise ValueError(f"A line of a diagram is a row or an arrow; got {part!r}. Write `key: text`.")
    return drawing.Node(found[2], tuple(found[3].split(" / ")), int(found[1] or 0))


def packages(needs: dict[str, set[str]]) -> str:
    """Return the diagram of the packages, each above those that it needs; what others bring along has no arrow."""
    level: dict[str, int] = {}
    while len(level) < len(needs):
        for name in needs:
            if needs[name] <= level.keys():
                level.setdefault(name, 1 + max((level[other] for other in needs[name]), default=-1))
    brought = {name: {inner for other in others for inner in needs[other]} for name, others in needs.items()}
    arrows = [(name, other) for name, others in needs.items() for other in sorted(others - brought[name])]
    lines = []
    for at in sorted(set(level.values()), reverse=True):
        row = [f"{_key(name)}: {name}" for name in sorted(needs) if level[name] == at]
        if any(level[start] > at > level[end] for start, end in arrows):
            row.append(f"{drawing.SPACE}: {'passed by an arrow':30}.")
        lines.append(" | ".join(row))
    return of("\n".join([*lines, *(f"{_key(start)} -> {_key(end)}" for start, end in arrows)]))


def _key(name: str) -> str:
    return name.replace("-", "_")


SHARES = {
    "DDP": (1, 1, 1),
    "ZeRO 1": (1, 1, 0),
    "ZeRO 2": (1, 0, 0),
    "FSDP, ZeRO 3": (0, 0, 0),
}
"""Whether a rank holds all of the weights, the gradients and the optimizer's state, by strategy."""

RANKS = 4


def parameters() -> str:
    """Return the picture of where weights, gradients and optimizer state live on four ranks."""
    out, parts = [], ("weights", "gradients", "optimizer")
    out += [drawing.text(168 + 130 * rank, 16, f"rank {rank}") for rank in range(RANKS)]
    for row, (name, whole) in enumerate(SHARES.items()):
        top = 30 + 66 * row
        out.append(drawing.text(104, top + 30, name, "end", 'font-weight="bold"'))
        for rank in range(RANKS):
            left = 114 + 130 * rank
            out.append(drawing.box(left, top, 110, 52, strength=0.03))
            for part, (color, all_of_it) in enumerate(zip(drawing.COLORS, whole, strict=False)):
                x, wide = (left + 6, 98) if all_of_it else (left + 6 + 98 / RANKS * rank, 98 / RANKS)
                place = f'x="{x:.1f}" y="{top + 6 + 14 * part}" width="{wide:.1f}" height="11"'
                out.append(f'<rect {place} fill="{color}" fill-opacity=".8"/>')
    for part, (word, color) in enumerate(zip(parts, drawing.COLORS, strict=False)):
        x, y = 114 + 110 * part, 30 + 66 * len(SHARES) + 4
        out.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{color}"/>')
        out.append(drawing.text(x + 15, y + 9, word, "start"))
    return drawing.picture("\n".join(out), 114 + 130 * RANKS, 30 + 66 * len(SHARES) + 20)


STEP = ("forward", "backward", "optimizer")
"""The parts of a training step."""

HELD = {
    "weights": (4, 4, 4, 4, 4, 4),
    "optimizer state": (8, 8, 8, 8, 8, 8),
    "activations": (0, 10, 0, 0, 0, 0),
    "gradients": (0, 0, 4, 4, 4, 0),
    "workspace": (1, 1, 1, 4, 4, 0),
}
"""What is in memory at the beginning and the end of each part of a step, for some batch, in bytes a parameter."""

_MOMENTS = (0.0, 1.0, 2.6, 2.6, 3.4, 3.4)


def memory() -> str:
    """Return the picture of what a training step with Adam holds, from moment to moment."""
    left, bottom, across, up = 20, 216, 150, 8
    below = [0] * len(_MOMENTS)
    out = []
    for (name, sizes), color in zip(HELD.items(), drawing.COLORS, strict=True):
        above = [base + size for base, size in zip(below, sizes, strict=True)]
        edge = [*zip(_MOMENTS, above, strict=True), *reversed([*zip(_MOMENTS, below, strict=True)])]
        points = " ".join(f"{left + across * when:.1f},{bottom - up * height:.1f}" for when, height in edge)
        out.append(f'<polygon points="{points}" fill="{color}" fill-opacity=".75"><title>{name}</title></polygon>')
        below = above
    borders = sorted(set(_MOMENTS))
    for name, start, end in zip(STEP, borders, borders[1:], strict=False):
        x = left + across * end
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{bottom}" {drawing.GRID}/>')
        out.append(drawing.text(left + across * (start + end) / 2, bottom + 16, name))
    out.append(drawing.text(left + across, 18, "all activations"))
    out.append(drawing.text(left + across * 2.6, 18, "all gradients"))
    right = left + across * borders[-1] + 18
    for number, (name, color) in enumerate(reversed([*zip(HELD, drawing.COLORS, strict=True)])):
        out.append(f'<rect x="{right:.1f}" y="{60 + 20 * number}" width="10" height="10" fill="{color}"/>')
        out.append(drawing.text(right + 15, 69 + 20 * number, name, "start"))
    return drawing.picture("\n".join(out), right + 120, bottom + 24)
