"""Replicas that are killed at random, by the dozen: what benchmarks/replicas.py measures is also right."""

import os
import re
import sys
from pathlib import Path

import pytest

from accel_core.testing import limits

pytest.importorskip("torchft", reason="torchft is not installed")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "replicas.py"


@pytest.mark.full("fuzz by the hundred")
def test_random_kills_lose_and_repeat_no_sample() -> None:
    """None of those that were not killed starts again, no sample is lost or repeated, and all end with equal weights.

    ACCEL_KILLS sets how many replicas are killed, 40 by default, which take three minutes.
    """
    kills = os.environ.get("ACCEL_KILLS", "40")
    command = [sys.executable, str(SCRIPT), "--only", "kills", "--kills", kills, "--minutes", "60"]
    done = limits.run(command, quiet=3600)
    assert done.returncode == 0, done.stderr
    rows = {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in done.stdout.splitlines())}
    found = {re.sub(r"\d+", "N", name): value for name, value in rows.items()}
    assert found["N kills in N runs: survivors restarted"] == "0", done.stderr
    assert found["runs that failed"] == "0", done.stderr
    assert found["samples lost; repeated"] == "0; 0", done.stderr
    equal, runs = found["runs that ended with bit-equal weights (N replicas)"].split(" of ")
    assert equal == runs, done.stderr
