"""After `load_state`, loaders of the drop-in give each rank the batches that accelerate 1.15.0 gives it.

What it gives was recorded. Set ACCEL_PEER_PYTHON to a Python that has accelerate 1.15.0 and torch to run it as well.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded import PEER, theirs

from accel_testing import limits
from accel_testing.programs import Program

PROGRAM = Path(__file__).with_name("resuming.py")
LIVE = pytest.mark.full("the original live")
NEEDED = pytest.mark.skipif(PEER is None, reason="needs ACCEL_PEER_PYTHON, a Python with accelerate 1.15.0")


def resumed(python: str, ranks: int, path: str) -> list[dict[str, Any]]:
    """Run the program with packages from `path`, and return what each rank read."""
    start = Program if python == sys.executable else subprocess.Popen
    environment = {**os.environ, "PYTHONPATH": path}
    done = limits.run([python, str(PROGRAM), str(ranks)], env=environment, quiet=60, started_by=start)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _righted(name: str) -> bool:
    """Whether the drop-in gives the order of the run that was not interrupted, where the original begins anew.

    That it does is tested in tests/ranks/test_resuming.py of accel-compat.
    """
    return name.startswith(("seedable", "data seed")) and not name.endswith("set_epoch")


@pytest.mark.parametrize("live", [False, pytest.param(True, marks=[LIVE, NEEDED])])
@pytest.mark.parametrize("ranks", [1, 2])
def test_scripts_go_on_with_the_same_batches(ranks: int, live: bool) -> None:
    """Interrupted in an epoch or at its end, then begun anew or skipped: batches, windows and random numbers agree."""
    ours = resumed(sys.executable, ranks, os.environ.get("PYTHONPATH", ""))
    # The variable may name a tree of this project, which the original must not find.
    original = theirs(f"resuming-{ranks}", live, lambda python: resumed(python, ranks, ""))
    assert len(ours) == len(original) == ranks
    for rank in range(ranks):
        different = [name for name, found in original[rank].items() if ours[rank][name] != found and not _righted(name)]
        assert not different, (rank, different[:5])
    assert len(original[0]) > 60
