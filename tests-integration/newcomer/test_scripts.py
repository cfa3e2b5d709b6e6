"""A training script written from the documentation alone, and the quickstart's in shards, run unchanged."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from accel_testing import limits, requires
from accel_testing.programs import ProgramAndRanks

SCRIPT = Path(__file__).with_name("bf16_with_compile.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def launched(*words: str) -> str:
    """Return what a launch printed that ended well."""
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return limits.run(command, env=environment, quiet=24, started_by=ProgramAndRanks, check=True).stdout


@pytest.mark.full("a whole training")
@requires("sklearn", "accelerate")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=requires("program:g++"))])
def test_bf16_with_compile(backend: str) -> None:
    """A compiled model in bf16 gives fp32 outputs, learns, and comes out plain."""
    printed = launched("--num-processes", "1", str(SCRIPT), backend)
    assert "outputs ['torch.float32']" in printed
    assert "type Sequential" in printed
    found = re.search(r"accuracy (\d\.\d+)", printed)
    assert found is not None, printed
    assert float(found[1]) >= 0.95


@pytest.mark.full("a whole training")
@requires("sklearn", "accel", "tensorboard")
def test_the_example_trains_in_shards(tmp_path: Path) -> None:
    """With flags of FSDP it reaches the accuracy that it asks for, on two ranks, and writes whole weights."""
    flags = ["--num-processes", "2", "--use-fsdp", "--fsdp-version", "2"]
    flags += ["--fsdp-state-dict-type", "FULL_STATE_DICT", "--fsdp-transformer-layer-cls-to-wrap", "Residual"]
    assert "test accuracy" in launched(*flags, str(EXAMPLES / "train_digits.py"), "--folder", str(tmp_path))
    assert list((tmp_path / "model").glob("*.safetensors"))
