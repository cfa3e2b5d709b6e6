"""When each rank of a pipeline computes what, on a clock on which only the work of stages takes time."""

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from html import escape
from typing import NamedTuple

from accel_core._records import record
from accel_parallel.pipeline.kwargs import SCHEDULES
from accel_plan._torch import schedule_order

__all__ = ["Slot", "Timeline", "Work", "draw", "order_of", "timeline"]


class Work(NamedTuple):
    """What a rank does at a time: "F" is a forward pass, "B" a backward pass, or its halves "I" and "W".

    "I" are gradients of inputs, "W" those of weights.
    """

    stage: int
    kind: str
    part: int  # the micro-batch


@record(frozen=True)
class Slot:
    """When a rank does it."""

    rank: int
    work: Work
    begin: float
    end: float


@record(frozen=True)
class Timeline:
    """A step of a pipeline; ranks wait for `bubble` of it, from 0 to 1."""

    slots: tuple[Slot, ...]
    ranks: int

    @property
    def length(self) -> float:
        """When the last rank is done."""
        return max(slot.end for slot in self.slots)

    @property
    def bubble(self) -> float:
        """The part of the step in which ranks wait, from 0 to 1."""
        return 1 - sum(slot.end - slot.begin for slot in self.slots) / (self.ranks * self.length)


def order_of(schedule: str, ranks: int, parts: int, stages: int) -> list[list[Work]]:
    """Return what each rank does one after the other, as torch's own schedule says.

    Raises:
        ValueError: The schedule does not run on so many micro-batches.
    """
    order = schedule_order(SCHEDULES[schedule], ranks, parts, stages // ranks)
    return [[Work(*each) for each in works] for works in order]


def timeline(order: Sequence[Sequence[Work]], costs: Sequence[float], backward: float = 2.0) -> Timeline:
    """Let each rank compute as soon as it has what it needs.

    Args:
        order: What each rank does one after the other.
        costs: For each stage, the time of a forward pass.
        backward: The time of a backward pass, in forward passes, of which gradients of weights take one.
    """
    known = {work: rank for rank, works in enumerate(order) for work in works}
    before: dict[Work, set[Work]] = {}
    for works in order:
        for place, work in enumerate(works):
            needed = {*works[place - 1 : place], *_needs(work, len(costs) - 1)}
            before[work] = {each for each in needed if each in known}
    long = {"F": 1.0, "B": backward, "I": backward - 1, "W": 1.0}
    slots: dict[Work, Slot] = {}
    for work in TopologicalSorter(before).static_order():
        begin = max((slots[each].end for each in before[work]), default=0.0)
        slots[work] = Slot(known[work], work, begin, begin + long[work.kind] * costs[work.stage])
    return Timeline(tuple(slots.values()), len(order))


def _needs(work: Work, last: int) -> list[Work]:
    """Return what has to be done before, on any rank; of a whole backward pass and its half, one is there."""
    stage, kind, part = work
    if kind == "F":
        return [Work(stage - 1, "F", part)]
    if kind == "W":
        return [Work(stage, "I", part)]
    return [Work(stage, "F", part), *(Work(stage + 1, each, part) for each in "BI" if stage < last)]


_LEFT, _WIDTH, _ROW, _TITLE = 62, 738, 22, 40
_WORDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
_STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; fill: #1f2328; }
.title { font-size: 13px; font-weight: 600; }
.note { font-size: 11px; fill: #59636e; }
g text { font-size: 10px; text-anchor: middle; }
.first text { fill: #ffffff; }
.second text { fill: #1f2328; }
.paper { fill: #ffffff; }
.idle { fill: #eff2f5; }
g rect { stroke: #ffffff; stroke-width: 1; }
.F { fill: #2f6aa8; } .B { fill: #b3541e; } .I { fill: #a03d6d; } .W { fill: #357a45; }
.second .F { fill: #9cc3ea; } .second .B { fill: #f3b48c; } .second .I { fill: #e8a8c8; } .second .W { fill: #9fd3ab; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.note { fill: #9198a1; }
.paper { fill: #0d1117; }
.idle { fill: #262c36; }
g rect { stroke: #0d1117; }
}
"""


def draw(panels: Mapping[str, Timeline]) -> str:
    """Draw steps one below the other, on one scale: ranks down, time across, micro-batches by number.

    Colors follow the reader's light or dark scheme; a rank's second stage is paler than its first.
    """
    longest = max(each.length for each in panels.values())
    lines, top = list[str](), 8.0
    for title, found in panels.items():
        lines.append(f'<text class="title" x="10" y="{top + 18:.1f}">{escape(title)}</text>')
        lines.append(
            f'<text class="note" x="{_LEFT + _WIDTH}" y="{top + 18:.1f}" text-anchor="end">'
            f"{found.bubble:.1%} of the time idle</text>"
        )
        lines += _panel(found, top + 26, _WIDTH / longest)
        top += _TITLE + _ROW * found.ranks
    x = float(_LEFT)
    for kind in sorted({slot.work.kind for found in panels.values() for slot in found.slots}, key="FBIW".index):
        lines.append(f'<rect class="{kind}" x="{x:g}" y="{top + 2:.1f}" width="12" height="12"/>')
        lines.append(f'<text class="note" x="{x + 17:g}" y="{top + 12:.1f}">{_WORDS[kind]}</text>')
        x += 36 + 6.0 * len(_WORDS[kind])
    lines.append(f'<text class="note" x="{x:g}" y="{top + 12:.1f}">paler: the second stage of a rank; time →</text>')
    width, height = _LEFT + _WIDTH + 10, top + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}">'
    )
    paper = f'<rect class="paper" width="{width}" height="{height:g}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", paper, *lines, "</svg>", ""])


def _panel(found: Timeline, top: float, scale: float) -> list[str]:
    """Draw a row for each rank."""
    lines = list[str]()
    for rank in range(found.ranks):
        y = top + _ROW * rank
        own = [slot for slot in found.slots if slot.rank == rank]
        first = min(slot.work.stage for slot in own)
        width = scale * found.length
        lines.append(f'<text class="note" x="10" y="{y + 14:.1f}">rank {rank}</text>')
        lines.append(f'<rect class="idle" x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{_ROW - 2}"/>')
        for stage in sorted({slot.work.stage for slot in own}):
            lines.append(f'<g class="{"first" if stage == first else "second"}">')
            lines += [_box(slot, y, scale) for slot in own if slot.work.stage == stage]
            lines.append("</g>")
    return lines


def _box(slot: Slot, y: float, scale: float) -> str:
    x, wide = _LEFT + scale * slot.begin, scale * (slot.end - slot.begin)
    stage, kind, part = slot.work
    place = f'x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{_ROW - 2}"'
    number = f'<text x="{x + wide / 2:.1f}" y="{y + 14:g}">{part}</text>' if wide > 9 else ""
    return f'<rect class="{kind}" {place}><title>{_WORDS[kind]} {part}, stage {stage}</title></rect>{number}'
