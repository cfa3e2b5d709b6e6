"""Options of a command that were written behind the script's arguments."""

from __future__ import annotations

import argparse

import pytest

from accel_launch.cli import build_parser, find_command


def parsed(line: str) -> argparse.Namespace:
    """Return what a command makes of a line."""
    name, *words = line.split()
    return build_parser(find_command(name)).parse_args(words)


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("verify-parallel --layouts dp2 --cpu --steps 5 train.py --lr 1 --json", ["--lr", "1", "--json"]),
        ("verify-parallel train.py --lr 1 --json --layouts dp2 --cpu --steps 5", ["--lr", "1", "--json"]),
        ("verify-parallel --steps 5 train.py --layouts=dp2 --cpu", []),
        ("verify-parallel --layouts dp2 --cpu --steps 5 train.py --layouts 3x3", ["--layouts", "3x3"]),
    ],
)
def test_options_may_follow_the_script(line: str, arguments: list[str]) -> None:
    """Words behind the script are its own, up to the needed option if that did not come before; then all is."""
    found = parsed(line)
    assert (found.script, found.script_arguments) == ("train.py", arguments)
    assert (found.layouts, found.cpu, found.steps, found.json) == ("dp2", True, 5, False)


def test_either_of_several_needed_options_begins_them() -> None:
    """`check-resume` needs two; with one of them before the script the other belongs there as well."""
    found = parsed("check-resume --cpu train.py data --at 3 --steps 6")
    assert (found.script_arguments, found.at, found.steps, found.cpu, found.num_processes) == (["data"], 3, 6, True, 1)
    assert parsed("check-resume train.py data").script_arguments == ["data"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify-parallel train.py --layouts dp2 --stepz 3", "unknown option --stepz. Did you mean --steps?"),
        ("try", "arguments are required: script\n"),
        ("check-resume --steps 3 train.py --at 2", "--at comes after the script. Write it before"),
    ],
)
def test_what_is_wrong_is_named(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option behind the script, one apart from the others, and no script."""
    with pytest.raises(SystemExit) as ended:
        parsed(line)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
