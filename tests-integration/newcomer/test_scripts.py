"""A training script written from the documentation alone runs unchanged, as a newcomer would start it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from accel_testing import limits, requires
from accel_testing.programs import ProgramAndRanks

SCRIPT = Path(__file__).with_name("bf16_with_compile.py")


@pytest.mark.full("a whole training")
@requires("sklearn", "accelerate")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=requires("program:g++"))])
def test_bf16_with_compile(backend: str) -> None:
    """A compiled model in bf16 gives fp32 outputs, learns, and comes out plain."""
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", "1", str(SCRIPT), backend]
    done = limits.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, quiet=18, started_by=ProgramAndRanks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outputs ['torch.float32']" in done.stdout
    assert "type Sequential" in done.stdout
    found = re.search(r"accuracy (\d\.\d+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) >= 0.95
