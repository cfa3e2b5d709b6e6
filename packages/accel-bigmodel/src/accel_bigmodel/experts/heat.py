"""How often which expert was chosen, as SVG."""

from collections.abc import Iterator, Mapping
from html import escape

__all__ = ["draw_heat"]

_LEFT, _TOP, _WIDTH, _ROW = 190, 40, 720, 18
_STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 11px; fill: #1f2328; }
.title { font-size: 16px; }
.paper { fill: #ffffff; }
.cold { fill: #eff2f5; }
.hot { fill: #c2410c; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.paper { fill: #0d1117; }
.cold { fill: #262c36; }
.hot { fill: #fb923c; }
}
"""


def draw_heat(title: str, rows: Mapping[str, tuple[int, Mapping[int, int]]]) -> str:
    """Draw a row of cells for each module of experts: the more often one was chosen, the stronger its color.

    Rows are, by the module's name, how many experts it has, and how often each was chosen.
    """
    height, width = _TOP + _ROW * len(rows) + 30, _LEFT + _WIDTH + 20
    columns = max((count for count, _ in rows.values()), default=1)
    most = max((times for _, chosen in rows.values() for times in chosen.values()), default=1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="10" y="24">{escape(title)}</text>',
    ]
    for place, (name, (count, chosen)) in enumerate(rows.items()):
        top = _TOP + place * _ROW
        lines.append(f'<text x="10" y="{top + 12}">{escape(name[-28:])}</text>')
        lines += _cells(count, chosen, top, _WIDTH / columns, most)
    lines.append(f'<text x="{_LEFT}" y="{height - 10}">experts 0 to {columns - 1}; the strongest color: {most}</text>')
    return "\n".join([*lines, "</svg>"])


def _cells(count: int, chosen: Mapping[int, int], top: int, width: float, most: int) -> Iterator[str]:
    for number in range(count):
        times = chosen.get(number, 0)
        where = f'x="{_LEFT + number * width:.1f}" y="{top}" width="{width * 0.94:.1f}" height="{_ROW - 2}"'
        yield f'<rect class="cold" {where}/>'
        if times:
            title = f"<title>expert {number}: {times}</title>"
            yield f'<rect class="hot" {where} opacity="{times / most:.2f}">{title}</rect>'
