"""The transformers Trainer trains on the drop-in as on Accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def one(compare: Callable[..., Any]) -> Any:
    """Return what the Trainer found in one process."""
    return compare("trainer")


@pytest.fixture(scope="module")
def two(compare: Callable[..., Any]) -> Any:
    """Return what the Trainer found on two gloo ranks."""
    return compare("trainer_ranks", ranks=2)


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "accumulation",
        "short window",
        "bf16",
        "clipping",
        "split",
        "dispatch",
        "stream",
        "unseeded",
        "checkpointing",
        "evaluate",
        "resume",
    ],
)
def test_one_process_is_bit_equal(one: Any, case: str) -> None:
    """Losses, gradient norms and weights are those of the original, bit by bit."""
    assert one.ours[case] == one.theirs[case]


def test_resuming_equals_going_on(one: Any) -> None:
    """A run that is resumed from its third step ends with the weights of one that was never stopped."""
    assert one.ours["resume"]["equal"]


def test_batch_size_is_found(one: Any) -> None:
    """The batch shrinks until it fits, by the same factors, and trains to the same weights."""
    assert one.ours["find batch size"] == one.theirs["find batch size"]


@pytest.mark.parametrize("case", ["plain", "accumulation"])
def test_two_ranks_train_alike(two: Any, case: str) -> None:
    """Two ranks agree with one another, and with the original to single precision."""
    assert two.ours[case]["ranks agree"]
    for key in ("losses", "evaluation", "weights"):
        assert two.ours[case][key] == pytest.approx(two.theirs[case][key], rel=1e-4, abs=1e-5)


def test_two_ranks_agree_after_an_evaluation(two: Any) -> None:
    """An evaluation before training does not part the ranks, as it does in the original."""
    assert two.ours["evaluated first"]["ranks agree"]
    assert two.ours["evaluated first"]["weights"] == pytest.approx(two.ours["plain"]["weights"], rel=1e-4, abs=1e-5)
