"""Prepared loaders give each rank the batches that accelerate 1.15.0 gives it.

Set ACCEL_PEER_PYTHON to a Python that has accelerate 1.15.0 and torch; without it these tests are skipped.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from accel_core.testing import limits

PEER = os.environ.get("ACCEL_PEER_PYTHON")
PROGRAM = Path(__file__).with_name("batches.py")

pytestmark = pytest.mark.skipif(PEER is None, reason="needs ACCEL_PEER_PYTHON, a Python with accelerate 1.15.0")


def batches(python: str, library: str, ranks: int) -> list[dict[str, object]]:
    """Run the program and return what each rank found."""
    done = limits.run([python, str(PROGRAM), library, str(ranks)], quiet=24)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_batches_on_each_rank(ranks: int) -> None:
    """Lengths, batch sizes, cutting, dispatching, dropping and shuffling: batches and ends are the same."""
    assert PEER is not None
    ours, theirs = batches(sys.executable, "accel_core", ranks), batches(PEER, "accelerate", ranks)
    assert len(ours) == len(theirs) == ranks
    different = [
        (rank, name, ours[rank][name], theirs[rank][name])
        for rank in range(ranks)
        for name in theirs[rank]
        if ours[rank][name] != theirs[rank][name]
    ]
    assert not different, different[:5]
    assert len(theirs[0]) > 100
