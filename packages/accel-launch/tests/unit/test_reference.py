"""The reference of options, and what it costs to add one."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_core.options.engines import absent
from accel_testing import requires

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "packages" / "accel-launch" / "tests" / "reference.py"
PAGE = ROOT / "docs" / "reference" / "options.md"


@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_reference_says_what_the_rows_say() -> None:
    """docs/reference/options.md is what the script prints: change a row, run the script."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert comparable(PAGE.read_text()) == comparable(done.stdout), f"Run {SCRIPT.relative_to(ROOT)}."


def comparable(page: str) -> list[str]:
    """Return a page's lines; without those of engines that are not installed, and then without headings."""
    marks = [
        mark for known in absent() for mark in (f"`--use-{known.word.replace('_', '-')}`", f"`{known.word}_config.")
    ]
    marks += ["`--replicas`", "`--min-replicas`"] if find_spec("accel_torchft") is None else []
    lines = page.splitlines()
    return [line for line in lines if line.startswith("| `") and not any(map(line.count, marks))] if marks else lines


LAUNCHERS = SCRIPT.with_name("launchers.py")


@requires("engine:deepspeed")
@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_page_of_launchers_shows_what_they_print() -> None:
    """docs/reference/launchers.md is what the script prints: change a launcher, run the script."""
    done = subprocess.run([sys.executable, str(LAUNCHERS)], capture_output=True, text=True, check=True)
    page = PAGE.with_name("launchers.md").read_text()
    assert page.splitlines() == done.stdout.splitlines(), f"Run {LAUNCHERS.relative_to(ROOT)}."


ROW = """
    color: str = option("red", "Which color shards have.", choices=("red", "blue"), prompt=Prompt("blue"))
"""


@requires("engine:fsdp")
@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_one_row_makes_an_option(tmp_path: Path) -> None:
    """One row in one file gives flag, help, checks, variable, file key, child environment, question and reference."""
    sources = [ROOT / "packages" / name / "src" for name in ("accel-core", "accel-launch", "accel-parallel")]
    for source in sources:
        shutil.copytree(source, tmp_path / "src", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "src" / "accel_parallel" / "options.py"
    table.write_text(table.read_text() + ROW)
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "train.py").touch()
    paths = os.pathsep.join([str(tmp_path / "src"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": paths, "HF_HOME": str(tmp_path), "FSDP_COLOR": ""}

    def run(*words: str, answers: str = "", **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**variables, **more},
            input=answers,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    launch = ("-m", "accel_launch", "launch", "--use-fsdp", "--cpu", "--dry-run")
    assert "Which color shards have." in run("-m", "accel_launch", "launch", "--help")
    assert "FSDP_COLOR=blue" in run(*launch, "--fsdp-color", "blue", "train.py")
    assert "got 'green'. Give it one of red, blue." in run(*launch, "--fsdp-color", "green", "train.py")
    assert "got 'green' from the variable FSDP_COLOR" in run(*launch, "train.py", FSDP_COLOR="green")
    (tmp_path / "c.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n  fsdp_color: blue\n")
    assert "FSDP_COLOR=blue" in run(*launch, "--config-file", "c.yaml", "train.py")
    assert "| `--fsdp-color` | Which color shards have. | `red`, `blue` | (`red`) |" in run("reference.py")
    answers = "\nseveral CPU processes\n\nno\nFSDP\n" + "\n" * 60
    asked = run("-m", "accel_launch", "config", "--config-file", "d.yaml", answers=answers)
    assert "Which color shards have [red/blue] (blue)" in asked
    assert "fsdp_color: blue" in (tmp_path / "d.yaml").read_text()
    core = "from accel_core.options.option import option_named\nfrom accel_parallel.options import FsdpOptions\n"
    assert "blue" in run("-c", core + "print(option_named(FsdpOptions, 'color').read())", FSDP_COLOR="blue")
