"""Every script of the gallery runs on one and on two processes, prints its result, and draws its curve."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_testing import limits

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "cross_validation": "wines tested             178",
    "image_classification": "test digits    360",
    "language_model": "bits per character",
    "masked_language_model": "guessed",
    "lora": "weights trained",
    "mixture_of_experts": "of which each process holds",
    "gan": "drawn digits taken for real",
    "reinforcement_learning": "a pole stands for",
    "distillation": "student, taught",
    "streaming": "the same weights  True, bit for bit",
    "distributed_inference": "answer 7",
}
"""Scripts, in an order in which each finds what it needs of those before, and a line that each prints."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all scripts write below."""
    return tmp_path_factory.mktemp("gallery")


def test_every_script_is_tested() -> None:
    """No script of the gallery is left out of these tests."""
    shared = {"corpus", "report"}
    assert {path.stem for path in (ROOT / "examples" / "gallery").glob("*.py")} - shared == set(SCRIPTS)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_result(name: str, processes: int, results: Path) -> None:
    """A script of the gallery ends well, prints its table once, and draws its curve where matplotlib is installed."""
    script = ROOT / "examples" / "gallery" / f"{name}.py"
    folder = results / str(processes) / name
    launch = ["-m", "accel_launch", "launch", "--cpu", "--num-processes", str(processes)]
    done = limits.run(
        [sys.executable, *launch, str(script), "--folder", str(folder)],
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        quiet=30,
        check=True,
    )
    assert done.stdout.count(SCRIPTS[name]) == 1, done.stdout
    assert re.search(rf"^  processes +{processes}$", done.stdout, re.MULTILINE), done.stdout
    assert ("of peak FLOP/s" in done.stderr) is (name == "language_model")  # which has a meter
    assert (folder / "curve.png").exists() is bool(find_spec("matplotlib"))  # which trackers bring along
    if os.environ.get("ACCEL_RECORD_GALLERY") and processes == 2:
        kept = ROOT / "docs" / "gallery"
        kept.mkdir(exist_ok=True)
        (kept / f"{name}.txt").write_text(done.stdout)
        (kept / f"{name}.png").write_bytes((folder / "curve.png").read_bytes())
