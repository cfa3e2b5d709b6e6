"""Prepared loaders give each rank the batches that accelerate 1.15.0 gives it.

What it gives was recorded. Set ACCEL_PEER_PYTHON to a Python that has accelerate 1.15.0 and torch to run it as well.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import PEER, theirs

from accel_testing import limits
from accel_testing.programs import Program

PROGRAM = Path(__file__).with_name("batches.py")
LIVE = pytest.mark.full("the original live")
NEEDED = pytest.mark.skipif(PEER is None, reason="needs ACCEL_PEER_PYTHON, a Python with accelerate 1.15.0")


def batches(python: str, library: str, ranks: int) -> list[dict[str, object]]:
    """Run the program and return what each rank found."""
    # The variable may name a tree of this project, which the original must not find.
    path = "" if library == "accelerate" else os.environ.get("PYTHONPATH", "")
    start = Program if python == sys.executable else subprocess.Popen
    environment = {**os.environ, "PYTHONPATH": path}
    done = limits.run([python, str(PROGRAM), library, str(ranks)], env=environment, quiet=24, started_by=start)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("live", [False, pytest.param(True, marks=[LIVE, NEEDED])])
@pytest.mark.parametrize("ranks", [1, 2])
def test_same_batches_on_each_rank(ranks: int, live: bool) -> None:
    """Lengths, batch sizes, cutting, dispatching, dropping and shuffling: batches and ends are the same."""
    ours = batches(sys.executable, "accel_core", ranks)
    original = theirs(f"batches-{ranks}", live, lambda python: batches(python, "accelerate", ranks))
    assert len(ours) == len(original) == ranks
    different = [
        (rank, name, ours[rank][name], original[rank][name])
        for rank in range(ranks)
        for name in original[rank]
        if ours[rank][name] != original[rank][name]
    ]
    assert not different, different[:5]
    assert len(original[0]) > 100
