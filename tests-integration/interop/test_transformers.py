"""The transformers Trainer trains on the drop-in as on Accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def trainer(compare: Callable[[str], Any]) -> Any:
    """Return what the Trainer found in one process."""
    return compare("trainer")


@pytest.fixture(scope="module")
def trainer_ranks(compare: Callable[[str], Any]) -> Any:
    """Return what the Trainer found on two gloo ranks."""
    return compare("trainer_ranks")


@pytest.fixture(scope="module")
def trainer_devices(on_devices: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return what the Trainer found on two simulated accelerators."""
    return on_devices("trainer_ranks")


@pytest.fixture(scope="module")
def trainer_kinds(compare: Callable[..., Any]) -> Any:
    """Return what trainers of other kinds found in one process."""
    return compare("trainer_kinds")


@pytest.fixture(scope="module")
def trainer_kinds_ranks(trainer_kinds: Any, compare: Callable[..., Any]) -> Any:
    """Return what trainers of other kinds found on two gloo ranks."""
    return compare("trainer_kinds", 2)


@pytest.fixture(scope="module")
def one_rank(alone: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return what the drop-in finds in one process on the batches that two ranks share."""
    return alone("trainer_ranks")


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
def test_one_process_is_bit_equal(trainer: Any, case: str) -> None:
    """Losses, gradient norms and weights are those of the original, bit by bit."""
    assert trainer.ours[case] == trainer.theirs[case]


def test_resuming_equals_going_on(trainer: Any) -> None:
    """A run that is resumed from its third step ends with the weights of one that was never stopped."""
    assert trainer.ours["resume"]["equal"]


def test_batch_size_is_found(trainer: Any) -> None:
    """The batch shrinks until it fits, by the same factors, and trains to the same weights."""
    assert trainer.ours["find batch size"] == trainer.theirs["find batch size"]


@pytest.mark.parametrize("case", ["plain", "accumulation", "split", "dispatch", "uneven evaluation"])
def test_two_ranks_train_alike(trainer_ranks: Any, assert_alike: Callable[..., None], case: str) -> None:
    """Two ranks agree with one another, and with the original to single precision."""
    assert_alike(trainer_ranks.ours[case], trainer_ranks.theirs[case])


@pytest.mark.parametrize("case", ["plain", "accumulation", "split", "dispatch", "uneven evaluation", "evaluated first"])
def test_two_devices_train_alike(
    trainer_ranks: Any, trainer_devices: dict[str, Any], assert_alike: Callable[..., None], case: str
) -> None:
    """Two simulated accelerators train as two ranks on the CPU."""
    assert_alike(trainer_devices[case], trainer_ranks.ours[case])


@pytest.mark.parametrize("case", ["plain", "accumulation", "split", "dispatch"])
def test_two_ranks_train_like_one(trainer_ranks: Any, one_rank: dict[str, Any], case: str) -> None:
    """Two ranks that share the batches of one process train to its losses and weights, to single precision."""
    for key in ("losses", "evaluation", "weights"):
        assert trainer_ranks.ours[case][key] == pytest.approx(one_rank[case][key], rel=1e-4, abs=1e-5)


def test_two_ranks_agree_after_an_evaluation(trainer_ranks: Any) -> None:
    """An evaluation before training does not part the ranks, as it does in the original."""
    first, plain = trainer_ranks.ours["evaluated first"], trainer_ranks.ours["plain"]
    assert first["ranks agree"]
    assert first["weights"] == pytest.approx(plain["weights"], rel=1e-4, abs=1e-5)


KINDS = ["pickled", "stream evaluation", "dispatched stream", "sharded stream", "compiled", "subclassed"]


@pytest.mark.parametrize("case", KINDS)
def test_other_kinds_are_bit_equal(trainer_kinds: Any, case: str) -> None:
    """Streams, also to evaluate, compiled models, subclassed Accelerators and pickled trainers give the original's."""
    assert trainer_kinds.ours[case] == trainer_kinds.theirs[case]


@pytest.mark.parametrize("case", KINDS)
def test_other_kinds_train_alike_on_two_ranks(
    trainer_kinds_ranks: Any, assert_alike: Callable[..., None], case: str
) -> None:
    """On two ranks they agree with one another, and with the original to single precision."""
    assert_alike(trainer_kinds_ranks.ours[case], trainer_kinds_ranks.theirs[case])
