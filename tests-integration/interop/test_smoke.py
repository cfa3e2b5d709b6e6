"""The smallest run of a client, beside the original: what every change has to pass (`nox -s interop` runs the rest)."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_testing import limits

CLIENT = Path(__file__).parent / "clients" / "smoke.py"

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def test_the_trainer_trains_as_on_the_original(original_alone: Path, tmp_path: Path) -> None:
    """Losses, gradient norms, rates, weights and the evaluation of a Trainer are the original's, bit by bit."""
    sides = []
    for name, path in (("ours", ""), ("theirs", str(original_alone))):
        (tmp_path / name).mkdir()
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        words = [sys.executable, str(CLIENT)]
        sides.append(subprocess.Popen(words, cwd=tmp_path / name, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [limits.communicate(side, quiet=30)[0] for side in sides]
    assert [side.returncode for side in sides] == [0, 0]
    ours, theirs = (json.loads(text.splitlines()[-1]) for text in printed)
    assert (ours.pop("accelerate").partition("+")[0], theirs.pop("accelerate")) == ("1.15.0", "1.15.0")
    assert len(ours["log"]) == 8
    assert ours == theirs
