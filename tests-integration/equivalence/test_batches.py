"""Prepared loaders give each rank the batches that accelerate 1.15.0 gives it, after `load_state` too.

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


def _righted(name: str) -> bool:
    """Whether the drop-in gives the order of the run that was not interrupted, where the original begins anew.

    That it does is tested in tests/ranks/test_resuming.py of accel-compat.
    """
    return name.startswith(("seedable", "data seed")) and not name.endswith("set_epoch")


@pytest.mark.parametrize("live", [False, LIVE])
@pytest.mark.parametrize("ranks", [1, 2])
def test_scripts_go_on_with_the_same_batches(ranks: int, live: bool) -> None:
    """Interrupted in an epoch or at its end, then begun anew or skipped: batches, windows and random numbers agree."""
    ours = printed(sys.executable, "resuming.py", str(ranks))
    original = theirs(f"resuming-{ranks}", live, lambda python: printed(python, "resuming.py", str(ranks)))
    assert len(ours) == len(original) == ranks
    for rank in range(ranks):
        different = [name for name, found in original[rank].items() if ours[rank][name] != found and not _righted(name)]
        assert not different, (rank, different[:5])
    assert len(original[0]) > 60
