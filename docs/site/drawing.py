"""Drawings as SVG: curves on logarithmic axes, bars, boxes with arrows.

Text and lines have the color of what surrounds them, so that a drawing on a page is read in light and in dark.
benchmarks/scale.py draws with it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP = 440, 280, 62, 34
COLORS = ("#2f86d1", "#d9722e", "#3ba55d", "#9a72cf", "#8a8a8a")
GRID = 'stroke="currentColor" stroke-opacity=".18"'
_LETTER, _LINE = 6.2, 15
"""About how wide a letter is, and how high a line."""


def picture(content: str, width: float, height: float, *, paper: bool = False) -> str:
    """Return an SVG of drawn parts; a file that is shown as an image has no surroundings and needs paper."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
    style = 'font-size="11" fill="#222">\n<rect width="100%" height="100%" fill="white"/>'
    inline = f'font-size="11" fill="currentColor" style="max-width: {width:g}px" role="img">'
    return "\n".join([head + (style if paper else inline), content, "</svg>", ""])


def text(x: float, y: float, said: str, anchor: str = "middle", more: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(said)}</text>'


def box(x: float, y: float, width: float, height: float, color: str = "currentColor", strength: float = 0.08) -> str:
    """Return a box that is filled a little."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5"'
    behind = f'<rect {place} fill="var(--md-default-bg-color, white)"/>'  # lines end at the box
    return f'{behind}<rect {place} fill="{color}" fill-opacity="{strength:g}" stroke="{color}" stroke-opacity=".7"/>'


def panel(title: str, across: str, curves: dict[str, list[tuple[float, float]]], x: int, y: int) -> str:
    """Draw curves on two logarithmic axes, a mark at every measured point."""
    points = [point for curve in curves.values() for point in curve if point[1] > 0]
    low, high = (math.floor(math.log10(min(p[1] for p in points))), math.ceil(math.log10(max(p[1] for p in points))))
    high = max(high, low + 1)
    first, last = (math.log10(edge(p[0] for p in points)) for edge in (min, max))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        along = (math.log10(point[0]) - first) / max(last - first, 1e-9)
        up = (math.log10(point[1]) - low) / (high - low)
        return LEFT + along * (WIDTH - LEFT - 20), TOP + (1 - up) * (HEIGHT - TOP - 76)

    bottom = place((10**first, 10**low))[1]
    out = [f'<g transform="translate({x},{y})"><text x="{LEFT}" y="18" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        at = place((10**first, 10**power))[1]
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{at:.1f}" y2="{at:.1f}" {GRID}/>')
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10**power:,g}</text>')
    for value in sorted({point[0] for point in points}):
        at = place((value, 10**low))[0]
        out.append(f'<text x="{at:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{value:,g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{bottom + 32:.1f}" text-anchor="middle">{across}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        places = [place(point) for point in curve if point[1] > 0]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{color}"/>' for px, py in places]
        at = LEFT + (number % 2) * 190, bottom + 50 + 15 * (number // 2)
        out.append(f'<rect x="{at[0]}" y="{at[1] - 9:.1f}" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{at[0] + 15}" y="{at[1]:.1f}">{name}</text>')
    return "\n".join([*out, "</g>"])


def bars(title: str, rows: Mapping[str, Mapping[str, float]], *, logarithmic: bool = False) -> str:
    """Draw a bar for each value of each row, the values of a series in one color.

    Args:
        title: What is measured, and in which unit.
        rows: Values by series, by the name of the row.
        logarithmic: Whether lengths are logarithms, for values of different orders.
    """
    series = list(dict.fromkeys(name for values in rows.values() for name in values))
    labels = max(len(name) for name in rows) * _LETTER + 14
    most = max(value for values in rows.values() for value in values.values())
    least = min((value for values in rows.values() for value in values.values() if value > 0), default=1)
    bottom = math.floor(math.log10(least)) if logarithmic else 0

    def length(value: float) -> float:
        if value <= 0:
            return 0.0
        share = (math.log10(value) - bottom) / (math.log10(most) - bottom) if logarithmic else value / most
        return max(1.5, 360 * share)

    out, y = [text(0, 14, title, "start", 'font-weight="bold"')], 26.0
    for name, values in rows.items():
        out.append(text(labels - 8, y + 4 + 7 * len(values), name, "end"))
        for key, value in values.items():
            color, long = COLORS[series.index(key) % len(COLORS)], length(value)
            out.append(f'<rect x="{labels:.1f}" y="{y:.1f}" width="{long:.1f}" height="12" fill="{color}"/>')
            out.append(text(labels + long + 5, y + 10, f"{value:,.10g}", "start"))
            y += 14
        y += 8
    if len(series) > 1:
        for number, key in enumerate(series):
            x = labels + sum(len(each) * _LETTER + 34 for each in series[:number])
            out.append(f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="10" height="10" fill="{COLORS[number]}"/>')
            out.append(text(x + 15, y + 11, key, "start"))
        y += 18
    scale = " (lengths are logarithms)" if logarithmic else ""
    out[0] = text(0, 14, title + scale, "start", 'font-weight="bold"')
    return picture("\n".join(out), labels + 430, y + 4)


SPACE = "_"
"""Key of a box that is not drawn and takes its place all the same."""


class Node(NamedTuple):
    """A box of a diagram.

    Attributes:
        key: What arrows call it.
        lines: The text in it.
        color: Number of its color, from 1; 0 for none.
    """

    key: str
    lines: tuple[str, ...]
    color: int = 0


class Arrow(NamedTuple):
    """An arrow between two boxes.

    Attributes:
        start: Key of the box where it starts.
        end: Key of the box to which it leads.
        label: Text beside it.
    """

    start: str
    end: str
    label: str = ""


def diagram(rows: Sequence[Sequence[Node]], arrows: Sequence[Arrow]) -> str:
    """Draw boxes in rows, each row in the middle, and straight arrows between them."""
    places: dict[str, tuple[float, float, float, float]] = {}
    labels = max((len(arrow.label) for arrow in arrows), default=0) * _LETTER
    sizes = [[_size(node) for node in row] for row in rows]
    gaps = [_gap(row, arrows) for row in rows]
    widths = [sum(w for w, _ in row) + gap * (len(row) - 1) for row, gap in zip(sizes, gaps, strict=True)]
    whole, y, out = max([*widths, 2 * labels + 30]) + 8, 6.0, []
    for row, size, gap, width in zip(rows, sizes, gaps, widths, strict=True):
        x, high = (whole - width) / 2 - gap, max(h for _, h in size)
        last = 0.0
        for node, (wide, _) in zip(row, size, strict=True):
            x, last = x + last + gap, wide
            if node.key == SPACE:
                continue
            places[node.key] = (x, y, wide, high)
            color = COLORS[node.color - 1] if node.color else "currentColor"
            out.append(box(x, y, wide, high, color, 0.16 if node.color else 0.06))
            first = y + high / 2 - _LINE * (len(node.lines) - 1) / 2 + 4
            out += [text(x + wide / 2, first + _LINE * n, line) for n, line in enumerate(node.lines)]
        y += high + 46
    drawn = [_arrow(places[arrow.start], places[arrow.end], arrow.label) for arrow in arrows]
    return picture("\n".join([*drawn, *out]), whole, y - 40)


def _size(node: Node) -> tuple[float, float]:
    return max(len(line) for line in node.lines) * _LETTER + 22, _LINE * len(node.lines) + 14


def _gap(row: Sequence[Node], arrows: Sequence[Arrow]) -> float:
    """Return how far apart the boxes of a row stand, so that the labels between them have room."""
    keys = {node.key for node in row}
    beside = [len(arrow.label) for arrow in arrows if {arrow.start, arrow.end} <= keys]
    return max([24.0, *(each * _LETTER + 26 for each in beside)])


def _arrow(start: tuple[float, float, float, float], end: tuple[float, float, float, float], label: str) -> str:
    (x1, y1, w1, h1), (x2, y2, w2, h2) = start, end
    if y1 == y2:
        right = x1 < x2
        ax, bx = (x1 + w1, x2) if right else (x1, x2 + w2)
        ay = by = y1 + h1 / 2
        tx, ty, anchor = (ax + bx) / 2, ay - 6, "middle"
    else:
        down = y1 < y2
        ax, bx = x1 + w1 / 2, x2 + w2 / 2
        shift = 0.3 * min(w1, w2) * max(-1.0, min(1.0, (bx - ax) / max(w1, w2)))
        ax, bx = ax + shift, bx - shift
        ay, by = (y1 + h1, y2) if down else (y1, y2 + h2)
        tx, ty, anchor = (ax + bx) / 2 + 7, (ay + by) / 2 + 4, "start"
    turn = math.degrees(math.atan2(by - ay, bx - ax))
    head = f'<path d="M0,0 L-8,-3.5 L-8,3.5 Z" transform="translate({bx:.1f},{by:.1f}) rotate({turn:.1f})"/>'
    line = f'<line x1="{ax:.1f}" y1="{ay:.1f}" x2="{bx:.1f}" y2="{by:.1f}" stroke="currentColor" stroke-opacity=".6"/>'
    return line + head + (text(tx, ty, label, anchor, 'font-style="italic"') if label else "")
