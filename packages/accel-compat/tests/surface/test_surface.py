"""Every name of Accelerate 1.15.0 is here with its signature, but for a pinned list."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PENDING: dict[str, str] = json.loads((HERE / "pending.json").read_text())
if sys.version_info < (3, 11):  # the surface was recorded on 3.11
    PENDING["accelerate.utils.dataclasses.EnumWithContains"] = "the constructor of an enum takes `boundary` since 3.11"


@pytest.fixture(scope="module")
def report() -> list[str]:
    """Return the lines that the check prints in a process of its own, without the user's cache settings."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, str(HERE / "surface_check.py"), "accelerate"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return done.stdout.splitlines()


def _failing(lines: list[str]) -> dict[str, str]:
    """Return the failing names with what is wrong; a name that is not exported counts under its package."""
    failing = {}
    for line in lines:
        exported = re.fullmatch(r"(\S+) does not export (\S+)", line)
        name, problem = (f"{exported[1]}.{exported[2]}", "is not exported") if exported else line.split(" ", 1)
        failing.setdefault(name.rstrip(":"), problem)
    return failing


def test_the_check_ran(report: list[str]) -> None:
    """The check reaches its closing line and compares all 865 names."""
    closing = re.fullmatch(r"(\d+) passed, (\d+) failed", report[-1])
    assert closing
    assert int(closing[1]) + int(closing[2]) == 865


def test_no_name_fails_that_is_not_pinned(report: list[str]) -> None:
    """A name that fails is on the pinned list, with a reason."""
    failing = _failing(report[:-1])
    assert {name: problem for name, problem in failing.items() if name not in PENDING} == {}


def test_no_pinned_name_passes(report: list[str]) -> None:
    """A name that passes is taken off the pinned list."""
    assert sorted(set(PENDING) - set(_failing(report[:-1]))) == []
