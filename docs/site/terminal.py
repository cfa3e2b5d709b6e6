"""A terminal that remembers when each of its lines changed, and an SVG that shows them changing.

Knows what commands of this repository send: lines, returns, colors, and the moves of a cursor that rewrite a question.
"""

from __future__ import annotations

import re
from html import escape
from itertools import groupby
from typing import NamedTuple

COLUMNS = 108
_WIDE, _HIGH, _EDGE = 7.8, 18, 14
"""How wide a letter and how high a line is, and the border around them."""

_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>78]|[\r\n\b\t\x07]")
_COLORS = {31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea", 90: "#8b949e"}
_LONGEST_PAUSE, _LAST_PAUSE = 1.5, 6.0
"""How many seconds a cast shows of a wait, and of its end."""


class Cell(NamedTuple):
    """A letter on the screen.

    Attributes:
        letter: The letter.
        look: Its presentation attributes in SVG.
    """

    letter: str
    look: str = ""


class Change(NamedTuple):
    """A line of the screen, from a time on.

    Attributes:
        row: Number of the line.
        time: Seconds since the cast began.
        cells: What the line holds from then on.
    """

    row: int
    time: float
    cells: tuple[Cell, ...]


class Screen:
    """What a terminal shows, as tall as needed.

    Attributes:
        changes: Every line that changed, in the order of time.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._rows: list[list[Cell]] = [[]]
        self._shown: dict[int, tuple[Cell, ...]] = {}
        self._row = self._column = 0
        self._codes: set[int] = set()

    @property
    def text(self) -> str:
        """What is on the screen now."""
        return "\n".join("".join(cell.letter for cell in row).rstrip() for row in self._rows).rstrip()

    def feed(self, text: str, time: float) -> None:
        """Show what a program printed.

        Args:
            text: What it printed, control sequences included.
            time: Seconds since the cast began.
        """
        end = 0
        for control in _CONTROL.finditer(text):
            self._write(text[end : control.start()])
            self._obey(control)
            end = control.end()
        self._write(text[end:])
        for number, row in enumerate(self._rows):
            cells = tuple(row)
            if self._shown.get(number, ()) != cells:
                self._shown[number] = cells
                self.changes.append(Change(number, time, cells))

    def _write(self, letters: str) -> None:
        look = self._look()
        for letter in letters:
            if self._column == COLUMNS:
                self._row, self._column = self._row + 1, 0
            row = self._current()
            row[self._column : self._column + 1] = [Cell(letter, look)]
            self._column += 1

    def _current(self) -> list[Cell]:
        while len(self._rows) <= self._row:
            self._rows.append([])
        row = self._rows[self._row]
        row.extend([Cell(" ")] * (self._column - len(row)))
        return row

    def _look(self) -> str:
        color = next((_COLORS[code] for code in sorted(self._codes) if code in _COLORS), "")
        parts = [f'fill="{color}"'] if color else []
        parts += ['font-weight="bold"'] if 1 in self._codes else []
        parts += ['opacity=".65"'] if 2 in self._codes else []
        return " ".join(parts)

    def _obey(self, control: re.Match[str]) -> None:
        parameters, letter = control[1], control[2]
        count = int(parameters) if (parameters or "").isdigit() else 1
        if control[0] == "\n":
            self._row += 1
            self._current()
        elif control[0] == "\r":
            self._column = 0
        elif control[0] == "\b":
            self._column = max(0, self._column - 1)
        elif control[0] == "\t":
            self._write(" " * (8 - self._column % 8))
        elif letter == "m":
            self._paint([int(code or 0) for code in parameters.split(";")])
        elif letter in ("A", "F"):
            self._row = max(0, self._row - count)
            self._column = 0 if letter == "F" else self._column
        elif letter in ("B", "E"):
            self._row += count
        elif letter == "C":
            self._column = min(COLUMNS, self._column + count)
        elif letter == "D":
            self._column = max(0, self._column - count)
        elif letter == "G":
            self._column = count - 1
        elif letter == "K":
            del self._current()[0 if parameters == "2" else self._column :]
        elif letter == "J":
            del self._current()[self._column :]
            for row in self._rows[self._row + 1 :]:
                row.clear()

    def _paint(self, codes: list[int]) -> None:
        for code in codes:
            if code == 0:
                self._codes.clear()
            elif code == 22:
                self._codes -= {1, 2}
            elif code == 39:
                self._codes -= set(_COLORS)
            else:
                self._codes.add(code)


def svg(screen: Screen, title: str) -> str:
    """Draw what a screen showed, as an endless animation; whoever wants no motion sees its end.

    Args:
        screen: A screen after the last command.
        title: What the cast shows, in a sentence.

    Returns:
        The SVG.
    """
    times = _shortened(sorted({change.time for change in screen.changes}))
    whole = max(times.values()) + _LAST_PAUSE
    lines, rules = [], []
    for row, found in groupby(sorted(screen.changes, key=lambda change: change.row), key=lambda change: change.row):
        versions = list(found)
        for version, following in zip(versions, [*versions[1:], None], strict=True):
            begin = 100 * times[version.time] / whole
            end = 100 * times[following.time] / whole if following else 100.0
            if any(cell.letter != " " for cell in version.cells):
                lines.append(_line(row, version.cells, f"r{len(rules)}", last=following is None))
                rules.append(_rule(f"r{len(rules)}", begin, end, whole))
    height = _HIGH * (1 + max(change.row for change in screen.changes)) + 2 * _EDGE
    width = COLUMNS * _WIDE + 2 * _EDGE
    still = "@media (prefers-reduced-motion: reduce) { text { animation: none !important; } }"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-size="13" fill="#e6edf3" '
    font = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" role="img">'
    style = "\n".join(["<style>", ".past { visibility: hidden; }", *rules, still, "</style>"])
    paper = '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>'
    return "\n".join([head + font, f"<title>{escape(title)}</title>", style, paper, *lines, "</svg>", ""])


def _shortened(times: list[float]) -> dict[float, float]:
    """Return when each moment is shown: waits are as long as they were, up to a limit."""
    shown, last, now = {}, times[0], 0.0
    for time in times:
        now += min(time - last, _LONGEST_PAUSE)
        shown[time], last = now, time
    return shown


def _line(row: int, cells: tuple[Cell, ...], name: str, *, last: bool) -> str:
    parts = []
    for look, run in groupby(cells, key=lambda cell: cell.look):
        letters = escape("".join(cell.letter for cell in run), quote=False)
        parts.append(f"<tspan {look}>{letters}</tspan>" if look else letters)
    long = sum(len(part.letter) for part in cells) * _WIDE
    place = f'x="{_EDGE}" y="{_EDGE + 13 + _HIGH * row}" textLength="{long:.1f}" lengthAdjust="spacingAndGlyphs"'
    kind = name if last else f"{name} past"
    return f'<text class="{kind}" {place} xml:space="preserve">{"".join(parts)}</text>'


def _rule(name: str, begin: float, end: float, whole: float) -> str:
    """Return the animation of a line. It begins with the last picture: a cast that stands still shows its end."""
    frames = "0% {visibility: hidden} " if begin else ""
    frames += f"{begin:.2f}% {{visibility: visible}}"
    frames += f" {end:.2f}%, 100% {{visibility: hidden}}" if end < 100 else " 100% {visibility: visible}"
    timing = f"{whole:.1f}s step-end {_LAST_PAUSE - whole:.1f}s infinite"
    return f"@keyframes {name} {{ {frames} }} .{name} {{ animation: {name} {timing}; }}"
