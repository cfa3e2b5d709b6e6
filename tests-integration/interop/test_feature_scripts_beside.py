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

SCRIPTS = Path(__file__).parents[1] / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("samples", "test_feature_scripts"))
WHERE = "import importlib.util; print(importlib.util.find_spec('accelerate').origin)"


@pytest.fixture(scope="module")
def original_alone(peer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that holds nothing but the original, so that one Python runs the same script on either."""
    package = Path(subprocess.run([peer, "-c", WHERE], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    folder = tmp_path_factory.mktemp("original")
    for path in package.parent.parent.glob("accelerate*"):
        (folder / path.name).symlink_to(path)
    return folder


def _run(name: str, processes: int, folder: Path, **variables: str) -> dict[str, Any]:
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPTS / f"{name}.py")],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))))


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


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_the_originals(name: str, processes: int, original_alone: Path, tmp_path: Path) -> None:
    """Every number is the original's: bit by bit on one process, to 1e-5 on two."""
    if name == "schedule_free" and find_spec("schedulefree") is None:
        pytest.skip("needs the library schedulefree, not installed here")
    ours = _run(name, processes, tmp_path / "ours")
    theirs = _run(name, processes, tmp_path / "theirs", PYTHONPATH=str(original_alone))
    assert ours["processes"] == processes
    assert _differences(ours, theirs, 0.0 if processes == 1 else 1e-5) == []
