"""Bars of bytes as SVG."""

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from accel_core._records import record

__all__ = ["Bar", "Segment", "draw_bars"]

_LEFT, _WIDTH, _RIGHT = 90, 720, 20
_BAR, _LINE, _GAP = 26, 14, 10
_CHARACTER = 6.2  # the mean width of a character of a name, in pixels
_NOTE = 125  # characters of a note in one line
_PALE = ("reserve", "headroom", "free")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 16px; }
.note, .tick { font-size: 11px; fill: #59636e; }
.name { font-size: 11px; fill: #ffffff; }
.reserve-name, .headroom-name, .free-name { font-size: 11px; fill: #1f2328; }
.paper { fill: #ffffff; }
.grid { stroke: #d1d9e0; }
.block { stroke: #ffffff; stroke-width: 1; }
.weights { fill: #4878a8; }
.reserve { fill: #e0a040; }
.headroom { fill: #8fbf7c; }
.gradients { fill: #7f9fc0; }
.optimizer { fill: #3f5f86; }
.communication { fill: #d0763c; }
.activations { fill: #4f8f5b; }
.logits { fill: #8a6fb0; }
.workspace { fill: #a8853a; }
.batch { fill: #8a8a8a; }
.free { fill: #eff2f5; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.note, .tick { fill: #9198a1; }
.free-name { fill: #e6edf3; }
.paper { fill: #0d1117; }
.grid { stroke: #3d444d; }
.block { stroke: #0d1117; }
.free { fill: #262c36; }
}
"""


@record(frozen=True)
class Segment:
    """A stretch of a bar."""

    purpose: str  # one of those that have a color, such as "weights" or "free"
    nbytes: int
    name: str
    title: str


@record(frozen=True)
class Bar:
    """A device."""

    label: str
    note: str
    segments: tuple[Segment, ...]


def draw_bars(title: str, bars: Sequence[Bar]) -> str:
    """Draw bars of bytes, all to one scale, above an axis; colors follow the reader's light or dark scheme."""
    longest = max((sum(segment.nbytes for segment in bar.segments) for bar in bars), default=0) or 1
    drawn: list[str] = []
    top = 44
    for bar in bars:
        drawn += _bar(bar, top, _WIDTH / longest)
        top += _BAR + _LINE * len(textwrap.wrap(bar.note, _NOTE)) + _GAP
    height, width = top + 58, _LEFT + _WIDTH + _RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="10" y="24">{escape(title)}</text>',
        *_axis(longest, top),
        *drawn,
        *_legend(bars, height - 14),
        "</svg>",
    ]
    return "\n".join(lines)


def _bar(bar: Bar, top: int, scale: float) -> Iterator[str]:
    yield f'<text x="10" y="{top + 18}">{escape(bar.label)}</text>'
    x = float(_LEFT)
    for segment in bar.segments:
        width = segment.nbytes * scale
        yield (
            f'<rect class="block {segment.purpose}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}">'
            f"<title>{escape(segment.title)}</title></rect>"
        )
        room = int((width - 8) / _CHARACTER)
        # The legend has the words for purposes: a part of one tells nothing.
        name = _shortened(segment.name, room) if segment.name != segment.purpose or len(segment.name) <= room else ""
        kind = f"{segment.purpose}-name" if segment.purpose in _PALE else "name"
        if name:
            yield f'<text class="{kind}" x="{x + 4:.1f}" y="{top + 17}">{escape(name)}</text>'
        x += width
    for number, line in enumerate(textwrap.wrap(bar.note, _NOTE)):
        yield f'<text class="note" x="{_LEFT}" y="{top + _BAR + 12 + number * _LINE}">{escape(line)}</text>'


def _shortened(name: str, room: int) -> str:
    """Return what of a name fits into so many characters: its end, which tells blocks apart."""
    if len(name) <= room:
        return name
    return f"…{name[-(room - 1) :]}" if room > 3 else ""


def _axis(longest: int, bottom: int) -> Iterator[str]:
    """Draw where round numbers of bytes lie."""
    unit = next(number for number in reversed(range(len(_UNITS))) if longest >= 1024**number or not number)
    size = 1024**unit
    steps = (step * size for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000))
    step = next((step for step in steps if longest / step <= 8), longest)
    for number in range(int(longest / step) + 1):
        x = _LEFT + number * step / longest * _WIDTH
        yield f'<line class="grid" x1="{x:.1f}" y1="36" x2="{x:.1f}" y2="{bottom}"/>'
        yield (
            f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">'
            f"{number * step / size:g} {_UNITS[unit]}</text>"
        )


def _legend(bars: Sequence[Bar], bottom: int) -> Iterator[str]:
    x = float(_LEFT)
    for purpose in dict.fromkeys(segment.purpose for bar in bars for segment in bar.segments):
        yield f'<rect class="block {purpose}" x="{x:g}" y="{bottom - 10}" width="12" height="12"/>'
        yield f'<text class="note" x="{x + 17:g}" y="{bottom}">{purpose}</text>'
        x += 30 + _CHARACTER * len(purpose)
