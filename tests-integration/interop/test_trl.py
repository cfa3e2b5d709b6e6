"""trl's trainers and its command line run on the drop-in as on Accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def trl(compare: Callable[..., Any]) -> Any:
    """Return what trl found."""
    return compare("trl_trainers")


@pytest.mark.parametrize("case", ["sft", "dpo", "reward"])
def test_trainers_are_bit_equal(trl: Any, case: str) -> None:
    """Losses and weights are those of the original, bit by bit, and finite."""
    assert trl.ours[case]["finite"]
    assert trl.ours[case] == trl.theirs[case]


def test_launch_command_runs_in_process(trl: Any) -> None:
    """The launch command and its parser are called from Python, as trl's command line does."""
    assert trl.ours["command line"] == trl.theirs["command line"]
