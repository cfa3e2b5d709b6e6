"""Bars of bytes as SVG."""

from collections.abc import Iterator, Sequence
from html import escape

from accel_core._records import record
from accel_core.modules.sizes import written_size

__all__ = ["Segment", "draw_bars"]

_WIDTH, _STEP, _BAR = 820, 52, 26
_CHARACTER = 6.5  # the mean width of a character, in pixels
_COLORS = {
    "weights": "#9bbbdc",
    "gradients": "#c3d5e8",
    "optimizer": "#7fa3c8",
    "communication": "#f0b48c",
    "activations": "#a5d0ae",
    "logits": "#c9b6e4",
    "workspace": "#dcc88a",
    "batch": "#c8c8c8",
    "reserve": "#f3cf92",
    "headroom": "#bfe0b2",
    "free": "#eff2f5",
}


@record(frozen=True)
class Segment:
    """A stretch of a bar."""

    purpose: str  # one of those that have a color
    nbytes: int
    name: str


def draw_bars(title: str, bars: Sequence[tuple[str, Sequence[Segment]]]) -> str:
    """Draw bars of bytes, all to one scale, each below its label; a stretch says its bytes where the mouse rests."""
    longest = max((sum(segment.nbytes for segment in segments) for _, segments in bars), default=0) or 1
    width, height = _WIDTH + 20, len(bars) * _STEP + 74
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="24">{escape(title)}</text>',
    ]
    for number, (label, segments) in enumerate(bars):
        lines.append(f'<text x="10" y="{number * _STEP + 54}" font-size="13">{escape(label)}</text>')
        lines += _bar(segments, number * _STEP + 60, _WIDTH / longest)
    used = dict.fromkeys(segment.purpose for _, segments in bars for segment in segments)
    for number, purpose in enumerate(used):
        x, y = number * 92 + 10, height - 22
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLORS[purpose]}"/>')
        lines.append(f'<text x="{x + 16}" y="{y + 10}" font-size="11">{purpose}</text>')
    return "\n".join([*lines, "</svg>"])


def _bar(segments: Sequence[Segment], top: int, scale: float) -> Iterator[str]:
    x = 10.0
    for segment in segments:
        width = segment.nbytes * scale
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{_COLORS[segment.purpose]}" '
            f'stroke="#ffffff"><title>{escape(segment.name)}: {written_size(segment.nbytes)}</title></rect>'
        )
        if len(segment.name) * _CHARACTER < width:
            yield f'<text x="{x + 4:.1f}" y="{top + 17}" font-size="11">{escape(segment.name)}</text>'
        x += width
