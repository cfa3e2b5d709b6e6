"""When ranks of a pipeline compute what."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from accel_core.host.versions import is_torch_version
from accel_parallel.pipeline.kwargs import SCHEDULES
from accel_plan.training.timeline import Timeline, draw, order_of, timeline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(is_torch_version("<", "2.13"), reason="several ranks are planned from torch 2.13 on"),
]


def stages_of(schedule: str, ranks: int) -> int:
    """Return how many stages a schedule has."""
    return ranks if schedule in ("gpipe", "1f1b") else 2 * ranks


def made(schedule: str, ranks: int, parts: int) -> Timeline:
    """Return a step in which stages have equal work."""
    stages = stages_of(schedule, ranks)
    return timeline(order_of(schedule, ranks, parts, stages), [1 / stages] * stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "parts"), [(2, 8), (4, 8), (4, 16)])
def test_every_stage_computes_every_micro_batch_once(schedule: str, ranks: int, parts: int) -> None:
    """Forward and backward, whole or in halves, on one rank, in an order in which each has what it needs."""
    stages = stages_of(schedule, ranks)
    slots = {slot.work: slot for slot in made(schedule, ranks, parts).slots}
    for stage in range(stages):
        for part in range(parts):
            kinds = {kind for kind in "FBIW" if (stage, kind, part) in slots}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
            assert len({slots[stage, kind, part].rank for kind in kinds}) == 1
            back = "B" if "B" in kinds else "I"
            assert slots[stage, "F", part].end <= slots[stage, back, part].begin
            if stage:
                assert slots[stage - 1, "F", part].end <= slots[stage, "F", part].begin
    for rank in range(ranks):
        own = sorted((slot for slot in slots.values() if slot.rank == rank), key=lambda slot: slot.begin)
        assert all(one.end <= other.begin + 1e-9 for one, other in pairwise(own))


@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (2, 16), (4, 8), (4, 32), (8, 16)])
def test_ranks_wait_as_long_as_theory_says(ranks: int, parts: int) -> None:
    """A rank waits for what the others do of the first micro-batch, and of the last: forward and backward, or halves.

    With two stages on a rank that is half as long; with gradients of weights in their place, a sixth is left.
    """
    fill = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 1 / 2, "zbv_zero_bubble": 1 / 6, "dualpipev": 1 / 6}
    for schedule, share in fill.items():
        wait = (ranks - 1) * share
        assert made(schedule, ranks, parts).bubble <= 1.02 * wait / (parts + wait), schedule


def test_a_drawing_has_a_row_for_each_rank_and_a_box_for_all_that_it_does() -> None:
    """Boxes say what they are, lie on the row of their rank, and follow light and dark schemes."""
    step = made("zbv_zero_bubble", 2, 4)
    drawn = draw({"zbv": step, "gpipe": made("gpipe", 2, 4)})
    name = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(drawn)
    words = [each.text for each in root.iter(f"{name}text")]
    assert words.count("rank 0") == words.count("rank 1") == 2
    assert f"{step.bubble:.1%} of the time idle" in words
    titles = [each.text for each in root.iter(f"{name}title")]
    assert len(titles) == 2 * 4 * 2 * 3 + 2 * 4 * 2
    assert "gradients of weights 3, stage 3" in titles
    assert "prefers-color-scheme: dark" in drawn
