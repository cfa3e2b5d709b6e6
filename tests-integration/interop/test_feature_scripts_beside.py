"""The scripts of `tests-integration/scripts` give the same numbers on the drop-in and on the original, unchanged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from accel_testing import limits

SCRIPTS = Path(__file__).parents[1] / "scripts"
NAMES = sorted(
    path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("forked", "samples", "test_feature_scripts")
)


@pytest.fixture(scope="module", params=[1, 2])
def ran(request: pytest.FixtureRequest, original_alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all scripts on one process or two, on both sides at the same time, and return the folder of the two."""
    folder = tmp_path_factory.mktemp("scripts")
    sides = []
    for side, variables in (("ours", {}), ("theirs", {"PYTHONPATH": str(original_alone)})):
        (folder / side).mkdir()
        words = [sys.executable, str(SCRIPTS / "forked.py"), str(folder / side), str(request.param), *NAMES]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
        sides.append(subprocess.Popen(words, env=environment))
    try:
        assert [side.wait(limits.limit(30)) for side in sides] == [0, 0]
    finally:
        for side in sides:
            side.kill()
    return folder


def _printed(folder: Path, name: str) -> dict[str, Any]:
    assert Path(folder, f"{name}.raised").read_text() == ""
    lines = Path(folder, f"{name}.printed").read_text().splitlines()
    return dict(json.loads(next(line for line in reversed(lines) if line.startswith("{"))))


def _differences(ours: Any, theirs: Any, tolerance: float, path: str = "") -> list[str]:
    """Return where two nests of numbers differ by more than a part of their size."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [d for key in ours for d in _differences(ours[key], theirs[key], tolerance, f"{path}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for index, (one, two) in pairs for d in _differences(one, two, tolerance, f"{path}[{index}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
    else:
        same = ours == theirs
    return [] if same else [f"{path}: {ours} here, {theirs} there"]


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_the_originals(name: str, ran: Path) -> None:
    """Every number is the original's: bit by bit on one process, to 1e-5 on two."""
    if name == "schedule_free" and find_spec("schedulefree") is None:
        pytest.skip("needs the library schedulefree, not installed here")
    ours, theirs = (_printed(ran / side, name) for side in ("ours", "theirs"))
    assert _differences(ours, theirs, 0.0 if ours["processes"] == 1 else 1e-5) == []
