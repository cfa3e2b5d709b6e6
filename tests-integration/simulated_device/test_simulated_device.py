"""Dispatch, offload and prefetch on devices with a real limit of memory."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from accel_testing import limits, requires
from accel_testing.programs import Program

HERE = Path(__file__).parent
pytestmark = requires("program:g++", "program:ninja")  # which build the simulated device
GROUPS = (
    ("mixed", "spread", "budget", "pinned"),
    ("refused", "gradients", "back", "prepared", "unshared"),
    ("full", "experts", "exhausted"),
    ("tight",),
)
"""Scenarios of one process, whose limit of memory they may change."""


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run all scenarios, and return what each raised."""
    gathered: dict[str, str] = {}
    Path(runpy.run_path(str(HERE / "simulated.py"))["build_folder"](), "lock").touch()  # as a killed build leaves it
    for names in GROUPS:
        words = [sys.executable, "scenario.py", str(tmp_path_factory.mktemp("scenario")), *names]
        done = limits.run(words, cwd=HERE, quiet=30, started_by=Program, check=True)
        gathered.update(json.loads(done.stdout.splitlines()[-1]))
    return gathered


@pytest.mark.parametrize("name", [name for names in GROUPS for name in names])
def test_a_scenario_holds(raised: dict[str, str], name: str) -> None:
    """What the function of this name in scenario.py says of models on devices, the CPU and the disk is so."""
    assert raised[name] == ""


def test_two_ranks_save_and_load(tmp_path: Path) -> None:
    """Weights, moments and generators come back on each rank's device, whatever way they were saved and read."""
    ranks = []
    for rank in range(2):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        settings = {"ACCELERATE_DEBUG_RDV_FILE": tmp_path / "meeting", "ACCELERATE_TORCH_DEVICE": f"simgpu:{rank}"}
        ranks.append(
            Program(
                [sys.executable, "rank.py", str(tmp_path)],
                cwd=HERE,
                env=os.environ | {name: str(value) for name, value in (places | settings).items()},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [limits.communicate(process, quiet=18) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors for _, errors in ended)
