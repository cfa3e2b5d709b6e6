"""A run under `accel launch` that is asked to end saves, leaves with a code, and resumes when started again."""

from __future__ import annotations

import json
import math
import re
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_core.checkpoint import commit
from accel_core.checkpoint.preemption import EXIT_CODE
from accel_testing import limits
from accel_testing.programs import ProgramAndRanks
from accel_testing.world import run

SCRIPT = Path(__file__).with_name("preempted.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2


def straight(folder: Path) -> None:
    """Run the script on this rank to its end, without a launcher."""
    runpy.run_path(str(SCRIPT))["main"](folder, 0.0)


def launch(folder: Path, pause: float) -> ProgramAndRanks:
    """Start `accel launch` with the script."""
    words = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", str(RANKS)]
    return ProgramAndRanks([*words, str(SCRIPT), str(folder), str(pause)], stderr=subprocess.PIPE, text=True)


def step(folder: Path) -> int:
    """Return the step that rank 1 has done."""
    path = folder / "at-1"
    return int(path.read_text() or 0) if path.exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a run that was not asked to end."""
    folder = tmp_path_factory.mktemp("straight")
    run(straight, RANKS, (folder,))
    return folder


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full("another case of a grid"))]
)
def test_asked_to_end_and_started_again(number: signal.Signals, uninterrupted: Path, tmp_path: Path) -> None:
    """In mid-epoch, with worker processes: the launcher gives 75, and the same command ends as a run without it."""
    launcher = launch(tmp_path, 0.05)
    limits.wait_until(lambda: step(tmp_path) >= 3 or launcher.poll() is not None)
    assert launcher.poll() is None, launcher.communicate()[1]
    assert step(tmp_path) >= 3
    launcher.send_signal(number)
    errors = limits.communicate(launcher)[1]
    assert launcher.returncode == EXIT_CODE, errors
    found = re.search(r"record: (\S+)", errors)
    assert found, errors
    assert [rank["exit_code"] for rank in json.loads(Path(found[1]).read_text())["ranks"]] == [EXIT_CODE] * RANKS
    assert "start the run again" in errors
    assert commit.find(tmp_path / "ckpt") is not None
    assert not (tmp_path / "end-0.pt").exists()
    launcher = launch(tmp_path, 0.0)
    errors = limits.communicate(launcher)[1]
    assert launcher.returncode == 0, errors
    for rank in range(RANKS):
        one = torch.load(uninterrupted / f"end-{rank}.pt", weights_only=True)
        two = torch.load(tmp_path / f"end-{rank}.pt", weights_only=True)
        assert torch.equal(one["weight"], two["weight"])
        assert torch.equal(one["next"], two["next"])


def example(folder: Path, leaves: bool) -> None:
    """Run two epochs of the example on this rank; it is asked to leave at the last step of the first one, or never."""
    sys.path.insert(0, str(EXAMPLES))
    import train_digits

    digits: Any = train_digits
    steps, asked = math.ceil(math.ceil(len(digits.datasets()[0]) / digits.BATCH) / digits.ACCUMULATION), []
    digits.EPOCHS, sys.argv = 2, ["train_digits.py", "--folder", str(folder)]
    digits.preemption.requested = lambda: bool(asked.append(1) or (leaves and len(asked) == steps))
    digits.accuracy = lambda *_: (1.0, len(digits.datasets()[1]))  # two epochs reach less than the example asks for
    with suppress(SystemExit):
        digits.main()
    assert len(asked) == (steps if leaves or (folder / "left").exists() else 2 * steps)
    (folder / "left").touch()


def test_an_epoch_that_ended_with_the_save_is_counted(tmp_path: Path) -> None:
    """Asked to leave at the last step of an epoch, the example goes on with the next one, and trains no epoch more."""
    for folder, leaves in (("straight", False), ("left", True), ("left", False)):
        run(example, 1, (tmp_path / folder, leaves))
    straight, resumed = (sorted((tmp_path / each / "model").glob("*.safetensors")) for each in ("straight", "left"))
    assert [each.read_bytes() for each in straight] == [each.read_bytes() for each in resumed]
    assert straight
