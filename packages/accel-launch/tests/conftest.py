"""What the tests of accel-launch share: the real command in a real process."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch.cli import main
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.settings.resolve import Settings
from accel_testing.guards import *  # noqa: F403

_OF_GLOO = re.compile(r".*(\[Gloo\]|peer ranks|is connected to).*|[\d\s]*")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run `accel WORDS…` in this process, and return what it printed; it ends with a status, 0 by default."""

    def run(*words: str, status: int = 0) -> Any:
        capsys.readouterr()
        try:
            ended: Any = main(list(words))
        except SystemExit as leaving:
            ended = leaving.code
        printed = capsys.readouterr()
        assert ended == status, printed.err
        return printed

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
