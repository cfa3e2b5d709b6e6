"""How long ranks of a pipeline wait, beside a clock that runs torch's own order of work."""

from collections.abc import Sequence
from graphlib import TopologicalSorter

import pytest

from accel_parallel.pipeline.kwargs import SCHEDULES
from accel_parallel.pipeline.stages import Stages
from accel_plan.training.pipelined import bubble_of
from accel_testing import requires

pytestmark = [pytest.mark.slow, requires("torch:2.13")]  # from which on several ranks are planned

Work = tuple[int, str, int]
"""A stage, a letter for what it computes ("I" and "W" are halves of a backward pass, "B"), and a micro-batch."""


def order_of(schedule: str, ranks: int, parts: int, stages: int) -> list[list[Work]]:
    """Return what each rank computes one after the other, as torch's own schedule says."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    order = list[list[Work]]()
    for actions in get_schedule_ops(SCHEDULES[schedule].removeprefix("Schedule"), ranks, parts, stages // ranks):
        works = [one for each in actions if each for one in each.sub_actions or [each]]
        own = [(one.stage_index, one.computation_type.value, one.microbatch_index or 0) for one in works]
        # Torch 2.13 numbers the forward passes of the last stage from 1 in Schedule1F1B, and runs them from 0.
        shift = {stage: part for stage, kind, part in reversed(own) if kind == "F"}
        order.append(
            [(stage, kind, part - shift[stage] * (kind == "F")) for stage, kind, part in own if kind in "FBIW"]
        )
    return order


def needs(work: Work, last: int) -> list[Work]:
    """Return what has to be done before, on any rank; of a whole backward pass and its half, one is there."""
    stage, kind, part = work
    if kind == "F":
        return [(stage - 1, "F", part)]
    if kind == "W":
        return [(stage, "I", part)]
    return [(stage, "F", part), *((stage + 1, each, part) for each in "BI" if stage < last)]


def waited(order: Sequence[Sequence[Work]], last: int) -> float:
    """Return the part of a step in which ranks wait, where each computes as soon as it has what it needs."""
    known = {work for works in order for work in works}
    before: dict[Work, set[Work]] = {}
    for works in order:
        for place, work in enumerate(works):
            before[work] = known.intersection([*works[place - 1 : place], *needs(work, last)])
    long = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    ends: dict[Work, float] = {}
    for work in TopologicalSorter(before).static_order():
        ends[work] = max((ends[each] for each in before[work]), default=0.0) + long[work[1]]
    busy = sum(long[kind] for _, kind, _ in known)
    return 1 - busy / (len(order) * max(ends.values()))


def laid_out(schedule: str, ranks: int, parts: int, stages: int) -> Stages:
    """Return stages of one block each."""
    turns = [stage % ranks for stage in range(stages)]
    if schedule in ("zbv_zero_bubble", "dualpipev"):
        turns = [min(stage, stages - 1 - stage) for stage in range(stages)]
    return Stages(tuple(map(str, range(stages))), tuple(range(stages)), tuple(turns), parts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "parts"), [(2, 8), (2, 16), (4, 8), (4, 32), (8, 16)])
def test_equal_stages_wait_as_torchs_order_makes_them(schedule: str, ranks: int, parts: int) -> None:
    """Where a backward pass takes two forward passes, the formula is what a clock over torch's own order says."""
    stages = ranks if schedule in ("gpipe", "1f1b") else 2 * ranks
    found = bubble_of(laid_out(schedule, ranks, parts, stages), schedule)
    assert found == pytest.approx(waited(order_of(schedule, ranks, parts, stages), stages - 1), abs=0.002)
