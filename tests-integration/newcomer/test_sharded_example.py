"""The example of the quickstart trains in shards, without a change."""

import os
import sys
from pathlib import Path

import pytest

from accel_testing import limits, requires

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full("a whole training")
@requires("sklearn", "accel", "tensorboard")
def test_the_example_trains_in_shards(tmp_path: Path) -> None:
    """With flags of FSDP it reaches the accuracy that it asks for, on two ranks, and writes whole weights."""
    flags = ["--cpu", "--num-processes", "2", "--use-fsdp", "--fsdp-version", "2"]
    flags += ["--fsdp-state-dict-type", "FULL_STATE_DICT", "--fsdp-transformer-layer-cls-to-wrap", "Residual"]
    script = [str(EXAMPLES / "train_digits.py"), "--folder", str(tmp_path)]
    done = limits.run(
        [sys.executable, "-m", "accel_launch", "launch", *flags, *script],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        quiet=24,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy" in done.stdout
    assert list((tmp_path / "model").glob("*.safetensors"))
