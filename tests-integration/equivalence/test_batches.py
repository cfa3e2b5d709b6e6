"""Prepared loaders give each rank the batches that accelerate 1.15.0 gives it.

What it gives was recorded. Set ACCEL_PEER_PYTHON to a Python that has accelerate 1.15.0 and torch to run it as well.
"""

import sys

import pytest
from recorded import LIVE, printed, theirs


@pytest.mark.parametrize("live", [False, LIVE])
@pytest.mark.parametrize("ranks", [1, 2])
def test_same_batches_on_each_rank(ranks: int, live: bool) -> None:
    """Lengths, batch sizes, cutting, dispatching, dropping and shuffling: batches and ends are the same."""
    ours = printed(sys.executable, "batches.py", "accel_core", str(ranks))
    original = theirs(f"batches-{ranks}", live, lambda python: printed(python, "batches.py", "accelerate", str(ranks)))
    assert len(ours) == len(original) == ranks
    different = [
        (rank, name, ours[rank][name], original[rank][name])
        for rank in range(ranks)
        for name in original[rank]
        if ours[rank][name] != original[rank][name]
    ]
    assert not different, different[:5]
    assert len(original[0]) > 100
