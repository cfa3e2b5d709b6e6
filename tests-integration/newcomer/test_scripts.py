"""Training scripts written from the documentation alone run unchanged, as a newcomer would start them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from accel_testing import limits, requires
from accel_testing.programs import ProgramAndRanks

HERE = Path(__file__).parent


def _run(script: str, *words: str, processes: int = 1) -> str:
    """Run a script through `accel launch` and return what it printed."""
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = limits.run([*command, str(HERE / script), *words], env=environment, quiet=18, started_by=ProgramAndRanks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _accuracy(printed: str) -> float:
    found = re.search(r"accuracy (\d\.\d+)", printed)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.full("a whole training")
@requires("sklearn", "accelerate")
@pytest.mark.parametrize("processes", [1, 2])
def test_plain_loop(processes: int) -> None:
    """The plain loop learns the irises on one process and on two, and counts each sample once."""
    printed = _run("plain_loop.py", processes=processes)
    assert "samples 150 " in printed
    assert f"model Sequential on cpu of {processes}" in printed
    assert _accuracy(printed) >= 0.95


@pytest.mark.full("a whole training")
@requires("sklearn", "accelerate")
@pytest.mark.parametrize("processes", [1, 2])
def test_accumulation_with_metrics(processes: int, tmp_path: Path) -> None:
    """Accumulation, clipping, metrics and checkpoints work together; the latest checkpoint restores the weights."""
    printed = _run("accumulation_with_metrics.py", str(tmp_path), processes=processes)
    assert "samples 37 " in printed
    assert "restored True" in printed
    assert _accuracy(printed) >= 0.9
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.full("a whole training")
@requires("sklearn", "accelerate")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=requires("program:g++"))])
def test_bf16_with_compile(backend: str) -> None:
    """A compiled model in bf16 gives fp32 outputs, learns, and comes out plain."""
    printed = _run("bf16_with_compile.py", backend)
    assert "outputs ['torch.float32']" in printed
    assert "type Sequential" in printed
    assert _accuracy(printed) >= 0.95
