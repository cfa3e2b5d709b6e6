"""The words of a command line: options of the command, the script, and the script's own."""

from __future__ import annotations

import pytest

from accel_launch.cli import build_parser, find_command


@pytest.mark.parametrize("name", ["verify-parallel", "check-resume", "try"])
def test_words_after_the_script_are_its_own(name: str) -> None:
    """Also those that are options of the command."""
    found = build_parser(find_command(name)).parse_args(["--cpu", "train.py", "--lr", "1", "--timeout", "5"])
    assert (found.cpu, found.script, found.script_arguments) == (True, "train.py", ["--lr", "1", "--timeout", "5"])
    assert found.timeout > 5
