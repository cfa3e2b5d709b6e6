"""Every name of Accelerate 1.15.0 is here with its signature, but for a pinned list."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.options.engines import absent
from accelerate import _rebinding

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
    """Return the failing names with what is wrong."""
    failing = {}
    for line in lines:
        name, problem = line.split(" ", 1)
        failing.setdefault(name.rstrip(":"), problem)
    return failing


def test_the_check_ran(report: list[str]) -> None:
    """The check reaches its closing line and compares all 865 names."""
    closing = re.fullmatch(r"(\d+) passed, (\d+) failed", report[-1])
    assert closing
    assert int(closing[1]) + int(closing[2]) == 865


def test_no_name_fails_that_is_not_pinned(report: list[str]) -> None:
    """A name that fails is on the pinned list, with a reason, or of an engine whose package is not installed."""
    failing = _failing(report[:-1])
    excused = tuple(f"cannot be had: {known.package} is not installed" for known in absent())
    assert {name: told for name, told in failing.items() if name not in PENDING and not told.startswith(excused)} == {}


@pytest.mark.parametrize("package", sorted({known.package for known in absent()}))
def test_names_of_an_engine_that_is_not_installed_say_so(report: list[str], package: str) -> None:
    """Asking for any name of the engine, and for no other one, is the error with the package to install."""
    told = {
        name: problem for name, problem in _failing(report[:-1]).items() if f"{package} is not installed" in problem
    }
    assert told
    for place, problem in told.items():
        mirror, _, name = place.rpartition(".")
        importlib.import_module(mirror)
        assert _rebinding._later[mirror][name].partition(".")[0] == package.replace("-", "_")
        assert problem.endswith(f"Run `pip install {package}`.")


def test_no_pinned_name_passes(report: list[str]) -> None:
    """A name that passes is taken off the pinned list."""
    assert sorted(set(PENDING) - set(_failing(report[:-1]))) == []
