"""The words of a command line: options of the command, the script, and the script's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_launch.cli import build_parser, find_command
from accel_launch.command import resolve_runner
from accel_verify.parallel import run


@pytest.mark.parametrize("name", ["verify-parallel", "check-resume", "try"])
def test_words_after_the_script_are_its_own(name: str) -> None:
    """Also those that are options of the command."""
    found = build_parser(find_command(name)).parse_args(["--cpu", "train.py", "--lr", "1", "--timeout", "5"])
    assert (found.cpu, found.script, found.script_arguments) == (True, "train.py", ["--lr", "1", "--timeout", "5"])
    assert found.timeout > 5


def test_an_option_after_the_script_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes to the script, and the command runs as without it."""
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(run, "run", lambda args: 0 if args.layouts == "dp2" else 1)
    command = find_command("verify-parallel")
    args = build_parser(command).parse_args([str(script), "--lr=1", "--layouts=fsdp2"])
    assert resolve_runner(command)(args) == 0
    assert capsys.readouterr().err.startswith("--layouts=fsdp2 comes after the script, so it goes to the script. W")
