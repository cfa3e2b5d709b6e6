"""Bars of bytes as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "Segment", "draw_bars"]

_COLOURS = {"weights": "#4878a8", "reserve": "#e0a040", "headroom": "#7fae6c", "free": "#eeeeee"}
_WIDTH, _LEFT, _ROW, _BAR = 720, 90, 44, 26


@dataclass(frozen=True)
class Segment:
    """A stretch of a bar.

    Attributes:
        purpose: "weights", "reserve", "headroom" or "free".
        nbytes: Its length.
        title: What a pointer over it shows.
    """

    purpose: str
    nbytes: int
    title: str


@dataclass(frozen=True)
class Bar:
    """A device.

    Attributes:
        label: Its name.
        note: What is written behind the bar's end.
        segments: Its stretches, from the left.
    """

    label: str
    note: str
    segments: tuple[Segment, ...]


def draw_bars(title: str, bars: Sequence[Bar]) -> str:
    """Draw bars of bytes, all to one scale.

    Args:
        title: What is written above.
        bars: The bars, from the top.

    Returns:
        An SVG document.
    """
    longest = max((sum(segment.nbytes for segment in bar.segments) for bar in bars), default=0) or 1
    height = 70 + _ROW * len(bars) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT + 20}" height="{height}" font-size="13">',
        f'<text x="10" y="24" font-size="16">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        top = 44 + number * _ROW
        lines.append(f'<text x="10" y="{top + 18}">{escape(bar.label)}</text>')
        x = float(_LEFT)
        for segment in bar.segments:
            width = segment.nbytes / longest * (_WIDTH - 10)
            lines.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[segment.purpose]}" '
                f'stroke="#ffffff" stroke-width="0.5"><title>{escape(segment.title)}</title></rect>'
            )
            x += width
        lines.append(f'<text x="{_LEFT}" y="{top + _BAR + 13}" font-size="10" fill="#555">{escape(bar.note)}</text>')
    for number, (purpose, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + number * 110
        lines.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{colour}" stroke="#999"/>')
        lines.append(f'<text x="{x + 17}" y="{height - 14}" font-size="11">{purpose}</text>')
    lines.append("</svg>")
    return "\n".join(lines)
