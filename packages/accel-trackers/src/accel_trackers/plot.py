"""Curves as text, for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence


def draw(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], *, width: int, height: int) -> str:
    """Draw curves over each other."""
    finite = {mark: [point for point in points if math.isfinite(point[1])] for mark, points in curves.items()}
    lost = sum(map(len, curves.values())) - sum(map(len, finite.values()))
    points = [point for series in finite.values() for point in series]
    notes = [f"  ({lost} values are not finite)"] if lost else []
    if not points:
        return "\n".join([title, "  (no finite values)", *notes])
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * width for _ in range(height)]
    for mark, series in finite.items():
        for column, value in _columns(series, left, right, width).items():
            # Halves, because the difference of two finite numbers may be infinite.
            place = 0.5 if high == low else (value / 2 - low / 2) / (high / 2 - low / 2)
            grid[height - 1 - round(place * (height - 1))][column] = mark
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    rows = [f"{labels.get(index, ''):>{margin}} |{''.join(row).rstrip()}" for index, row in enumerate(grid)]
    first, last = f"{left:g}", f"{right:g}"
    axis = f"{'':>{margin}} +{'-' * width}"
    steps = f"{'':>{margin}}  {first}{last:>{max(1, width - len(first))}}"
    return "\n".join([title, *rows, axis, steps, *notes])


def _columns(series: Sequence[tuple[float, float]], left: float, right: float, width: int) -> dict[int, float]:
    """Give each column the mean of its points, and columns without points the value on the line between neighbors."""
    gathered: dict[int, list[float]] = {}
    for x, y in series:
        column = 0 if right == left else round((x - left) / (right - left) * (width - 1))
        gathered.setdefault(column, []).append(y)
    means = {column: sum(value / len(values) for value in values) for column, values in sorted(gathered.items())}
    for before, after in itertools.pairwise(list(means)):
        for column in range(before + 1, after):
            share = (column - before) / (after - before)
            means[column] = means[before] * (1 - share) + means[after] * share
    return means


def printable(text: str) -> str:
    """Return a text as one line for a terminal, escaping control characters, which could control the terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
