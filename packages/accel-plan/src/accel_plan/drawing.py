"""Bars of bytes as SVG."""

from collections.abc import Mapping
from html import escape

from accel_core.modules.sizes import written_size

_WIDTH, _STEP = 820, 52
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


def draw_bars(title: str, bars: Mapping[str, Mapping[str, int]]) -> str:
    """Draw bars of bytes by purpose, all to one scale, each below its label; a part says its bytes under the mouse."""
    longest = max((sum(parts.values()) for parts in bars.values()), default=0) or 1
    width, height = _WIDTH + 20, len(bars) * _STEP + 74
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="24">{escape(title)}</text>',
    ]
    for number, (label, parts) in enumerate(bars.items()):
        x, y = 10.0, number * _STEP + 54
        lines.append(f'<text x="10" y="{y}" font-size="13">{escape(label)}</text>')
        for purpose, count in parts.items():
            long = count * _WIDTH / longest
            lines.append(
                f'<rect x="{x:.1f}" y="{y + 6}" width="{long:.1f}" height="26" fill="{_COLORS[purpose]}" '
                f'stroke="#ffffff"><title>{purpose}: {written_size(count)}</title></rect>'
            )
            x += long
    for number, purpose in enumerate(dict.fromkeys(purpose for parts in bars.values() for purpose in parts)):
        x, y = number * 92 + 10, height - 22
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLORS[purpose]}"/>')
        lines.append(f'<text x="{x + 16}" y="{y + 10}" font-size="11">{purpose}</text>')
    return "\n".join([*lines, "</svg>"])
