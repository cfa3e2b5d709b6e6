"""What the tests of accel-verify share: the real command in a real process."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from accel_testing import limits
from accel_testing.guards import *  # noqa: F403
from accel_testing.programs import ProgramAndRanks

Accel = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def accel(tmp_path: Path, variables: dict[str, str]) -> Accel:
    """Run `accel WORDS…` in an empty folder, without the settings of the machine that tests.

    It and its ranks are forked with torch loaded; with `forked=False` they are processes as every user's.
    """

    def run(
        *words: str, more: Mapping[str, str] | None = None, quiet: float = 6, forked: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        command, environment = [sys.executable, "-m", "accel_launch", *words], {**variables, **(more or {})}
        options = {"quiet": quiet, "cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL}
        return limits.run(command, started_by=ProgramAndRanks if forked else subprocess.Popen, **options)

    return run
