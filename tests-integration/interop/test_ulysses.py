"""transformers' Trainer with `parallelism_config=` shares sequences on two gloo ranks, and trains as one process."""

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: `nox -s deepspeed`")


@pytest.mark.parametrize("case", ["stage 2", "stage 3"])
def test_the_trainer_shares_sequences(sharded: Any, assert_close: Any, case: str) -> None:
    """Losses, norms, evaluation and whole weights are those of one process: last windows are short, stage 3 resumes."""
    two, one = (side[case] for side in sharded("ulysses_trainer"))
    assert_close(two, one, *one)


def test_the_trainer_takes_every_step_that_it_counts(sharded: Any) -> None:
    """Five batches for two ranks are six, as the Trainer counts them: the window that is cut short is taken too."""
    two, _ = sharded("ulysses_trainer")
    assert two["uneven"]["steps"] == len(two["uneven"]["loss"]) == 4
