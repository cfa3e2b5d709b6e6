"""What accelerate 1.15.0 gives, as it was recorded: running it takes as long as all that is compared with it.

`ACCEL_RECORD_PEER=1 nox -s second -- tests-integration/equivalence` records it anew.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_testing import limits
from accel_testing.programs import Program

PEER = os.environ.get("ACCEL_PEER_PYTHON")
FOLDER = Path(__file__).with_name("peer")
LIVE = pytest.param(
    True,
    marks=[
        pytest.mark.full("the original live"),
        pytest.mark.skipif(PEER is None, reason="needs ACCEL_PEER_PYTHON, a Python with accelerate 1.15.0"),
    ],
)


def printed(python: str, program: str, *words: str) -> list[dict[str, Any]]:
    """Run a program of this folder, and return what it prints of each rank."""
    ours = python == sys.executable
    # The variable may name a tree of this project, which the original must not find.
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "") if ours else ""}
    command, start = [python, str(FOLDER.with_name(program)), *words], Program if ours else subprocess.Popen
    done = limits.run(command, env=environment, quiet=60, started_by=start, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def theirs(name: str, live: bool, run: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what the original gives on each rank: what is kept, which is what it gives now where it is run live."""
    file = FOLDER / f"accelerate-1.15.0-{name}.json.gz"
    found = run(PEER) if live and PEER else None
    if found is not None and os.environ.get("ACCEL_RECORD_PEER"):
        FOLDER.mkdir(exist_ok=True)
        file.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))
    kept: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))
    assert found is None or found == kept, f"the original does not give what is kept in {file.name}"
    return kept
