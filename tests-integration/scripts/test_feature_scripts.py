"""Scripts in the style of Accelerate's examples, each on one process of the drop-in.

`tests-integration/interop` runs the same scripts beside the original, on one process and on two.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_testing import requires, world

HERE = Path(__file__).parent

pytestmark = requires("accelerate", "numpy")

HOLDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "automatic_accumulation": lambda found: found["tried"] == [32, 16, 8] and found["losses"][-1] < found["losses"][0],
    "memory": lambda found: found["tried"][-1] <= 96 < found["tried"][-2],
    "cross_validation": lambda found: sum(asked for asked, _ in found["validated"]) == 450 and found["tested"] == 83,
    "early_stopping": lambda found: found["stopped_at"][1] == found["steps"][0] and not found["still_set"],
    "local_sgd": lambda found: max(found["apart"]) == 0,
    "autoregressive_accumulation": lambda found: (
        sum(found["counts"][: found["steps"] // 2]) * 2 == sum(found["counts"])
    ),
    "ddp_comm_hooks": lambda found: found["none"] == found["power"],
    "schedule_free": lambda found: found["right"][-1][1] > found["right"][0][1],
    "profiler": lambda found: found["counts"]["aten::addmm"] == 6 and found["kept"] == [True],
    "tracking": lambda found: len(found["lines"]) == 35 and found["same"] and found["beside"] == [],
    "multi_process_metrics": lambda found: (
        {found[way]["asked"] for way in ("map", "stream", "dispatched")} == {89} and found["map"] == found["stream"]
    ),
    "checkpointing": lambda found: found["same"] and found["equal"] and found["same_rate"],
}
"""Of each script, what its numbers have to be like."""


def _all_scripts(place: str) -> None:
    """Run each script on one process; the body of the process that forks them."""
    run_all = runpy.run_path(str(HERE / "forked.py"))["run_all"]
    run_all(Path(place), 1, HOLDS)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all scripts once, and return the folder of what they left."""
    folder = tmp_path_factory.mktemp("scripts")
    world(1, quiet=30)(_all_scripts)(str(folder))
    return folder


@pytest.mark.parametrize("name", HOLDS)
def test_the_script_runs(name: str, ran: Path) -> None:
    """The script runs to its end and prints numbers that are what they should be."""
    if name == "schedule_free":
        pytest.importorskip("schedulefree")
    raised = Path(ran, f"{name}.raised").read_text()
    assert raised == ""
    found = json.loads(Path(ran, f"{name}.printed").read_text().splitlines()[-1])
    assert found["processes"] == 1
    assert HOLDS[name](found), found


def test_every_script_is_looked_at() -> None:
    """No script lies here without a test."""
    assert {path.stem for path in HERE.glob("*.py")} - {"forked", "samples", Path(__file__).stem} == set(HOLDS)
