"""Every script of the gallery runs on one and on two processes, prints its result, and draws its curve."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_core.testing import limits

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


def launched(name: str, folder: Path, *flags: str) -> str:
    """Run a script of the gallery, and return what it printed."""
    script = ROOT / "examples" / "gallery" / f"{name}.py"
    done = limits.run(
        [sys.executable, "-m", "accel_launch", "launch", "--cpu", *flags, str(script), "--folder", str(folder)],
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        quiet=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_pipeline_learns_what_one_process_learns(results: Path) -> None:
    """Two ranks that share the language model out end with the loss of one process, and with its words."""
    stages = ["--num-processes", "2", "--use-parallelism-config", "--parallelism-config-pp-size", "2"]
    found = [
        launched("language_model", results / str(len(flags)), *flags) for flags in (["--num-processes", "1"], stages)
    ]
    one, piped = (re.findall(r"^  (?:bits per character|it writes) +(.*)$", each, re.MULTILINE) for each in found)
    assert len(one) == 2
    assert one == piped


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_result(name: str, processes: int, results: Path) -> None:
    """A script of the gallery ends well, prints its table once, and draws its curve where matplotlib is installed."""
    folder = results / str(processes) / name
    printed = launched(name, folder, "--num-processes", str(processes))
    assert printed.count(SCRIPTS[name]) == 1, printed
    assert re.search(rf"^  processes +{processes}$", printed, re.MULTILINE), printed
    assert (folder / "curve.png").exists() is bool(find_spec("matplotlib"))  # which trackers bring along
    if os.environ.get("ACCEL_RECORD_GALLERY") and processes == 2:
        kept = ROOT / "docs" / "gallery"
        kept.mkdir(exist_ok=True)
        (kept / f"{name}.txt").write_text(printed)
        (kept / f"{name}.png").write_bytes((folder / "curve.png").read_bytes())
