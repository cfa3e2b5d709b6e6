"""sentence-transformers and setfit encode, train and go on from checkpoints on the drop-in as on Accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def encoder(compare: Callable[[str], Any]) -> Any:
    """Return what sentence-transformers found."""
    return compare("encoder")


@pytest.fixture(scope="module")
def fewshot(compare: Callable[[str], Any]) -> Any:
    """Return what setfit found."""
    return compare("fewshot")


@pytest.fixture(scope="module")
def encoder_ranks(encoder: Any, compare: Callable[..., Any]) -> Any:
    """Return what sentence-transformers found on two gloo ranks."""
    return compare("encoder", 2)


@pytest.fixture(scope="module")
def encoder_devices(on_devices: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return what sentence-transformers found on two simulated accelerators."""
    return on_devices("encoder")


@pytest.mark.parametrize("case", ["similarity", "ranking", "resumed"])
def test_two_ranks_train_alike(encoder_ranks: Any, assert_alike: Callable[..., None], case: str) -> None:
    """Two ranks agree with one another, and with the original to single precision."""
    assert_alike(encoder_ranks.ours[case], encoder_ranks.theirs[case])


@pytest.mark.parametrize("case", ["similarity", "ranking", "resumed"])
def test_two_devices_train_alike(
    encoder_ranks: Any, encoder_devices: dict[str, Any], assert_alike: Callable[..., None], case: str
) -> None:
    """Two simulated accelerators train as two ranks on the CPU."""
    assert_alike(encoder_devices[case], encoder_ranks.ours[case])


@pytest.mark.parametrize("case", ["encode", "similarity", "ranking", "resumed"])
def test_encoding_and_training_are_bit_equal(encoder: Any, case: str) -> None:
    """Vectors, losses, weights and files are those of the original, bit by bit."""
    assert encoder.ours[case] == encoder.theirs[case]


def test_a_resumed_run_ends_as_the_other(encoder: Any) -> None:
    """The last two steps from the checkpoint end with the weights of the run that was not interrupted."""
    assert encoder.ours["resumed"] == encoder.ours["ranking"]


def test_setfit_trains_bit_equal(fewshot: Any) -> None:
    """What setfit predicts, its files and weights are those of the original, bit by bit, and again once resumed."""
    assert fewshot.ours == fewshot.theirs
    assert fewshot.ours["resumed"].items() <= fewshot.ours["straight"].items()
