"""What the tests of accel-launch share: the real command in a real process."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.settings.resolve import Settings
from accel_testing import limits
from accel_testing.guards import *  # noqa: F403
from accel_testing.programs import ProgramAndRanks

Accel = Callable[..., "subprocess.CompletedProcess[str]"]


_OF_GLOO = re.compile(r".*(\[Gloo\]|peer ranks|is connected to).*|[\d\s]*")


@pytest.fixture
def accel(tmp_path: Path, variables: dict[str, str]) -> Accel:
    """Run `accel WORDS…` in an empty folder, without the settings of the machine that tests.

    The command and the ranks that it starts are forked with torch loaded; with `forked=False` they are processes as
    every user's.
    """

    def run(
        *words: str, more: Mapping[str, str] | None = None, quiet: float = 6, forked: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "accel_launch", *words]
        environment = {**variables, **(more or {})}
        options = {"quiet": quiet, "cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL}
        return limits.run(command, started_by=ProgramAndRanks if forked else subprocess.Popen, **options)

    return run


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Return what resolves a command line."""
    return lambda *words: settings_from(launch_command_parser().parse_args(list(words)))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script into the folder where `accel` runs, and return its name."""

    def write(source: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(source)
        return name

    return write


@pytest.fixture
def printed() -> Callable[[str], list[str]]:
    """Return the lines of a standard output without what gloo of torch 2.8 prints, in pieces, when ranks connect."""
    return lambda output: [line for line in output.splitlines() if not _OF_GLOO.fullmatch(line)]
