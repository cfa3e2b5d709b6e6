"""sentence-transformers encodes on the drop-in as on Accelerate 1.15.0, and trains once its identity check is away."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def encoder(compare: Callable[[str], Any]) -> Any:
    """Return what sentence-transformers found."""
    return compare("encoder")


@pytest.mark.parametrize("case", ["encode", "similarity", "ranking"])
def test_encoding_and_training_are_bit_equal(encoder: Any, case: str) -> None:
    """Vectors, losses and weights are those of the original, bit by bit."""
    assert encoder.ours[case] == encoder.theirs[case]


def test_the_identity_check_refuses(encoder: Any) -> None:
    """Its trainer asks for the original's home page and refuses without it: the one known deviation."""
    assert (encoder.ours["refused"], encoder.theirs["refused"]) == (True, False)
