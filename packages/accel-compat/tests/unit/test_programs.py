"""The programs of Accelerate are there and hand their words to accel-launch."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

from accel_launch import cli
from accelerate import _commands

PROGRAMS = {
    "accelerate": "accelerate.commands.accelerate_cli:main",
    "accelerate-config": "accelerate.commands.config:main",
    "accelerate-estimate-memory": "accelerate.commands.estimate:main",
    "accelerate-launch": "accelerate.commands.launch:main",
    "accelerate-merge-weights": "accelerate.commands.merge:main",
}


def test_console_scripts_are_the_originals() -> None:
    """The distribution installs the five programs that people have, and each leads to a function."""
    scripts = importlib.metadata.distribution("accelerate").entry_points.select(group="console_scripts")
    assert {script.name: script.value for script in scripts} == PROGRAMS
    for place in PROGRAMS.values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("config", "config"),
        ("config.config", "config"),
        ("env", "env"),
        ("estimate", "estimate-memory"),
        ("launch", "launch"),
        ("merge", "merge-weights"),
        ("test", "test"),
        ("tpu", "tpu-config"),
    ],
)
def test_a_program_runs_its_command(monkeypatch: pytest.MonkeyPatch, module: str, word: str) -> None:
    """A program's function runs the command with the words of the process and returns its status."""
    seen: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda words, **kwargs: seen.append(words) or 7)
    monkeypatch.setattr(sys, "argv", ["program", "--word", "1"])
    assert importlib.import_module(f"accelerate.commands.{module}").main() == 7
    assert seen == [[word, "--word", "1"]]


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["launch", "--help"], ["merge-weight"], ["to-fsdp2"]])
def test_the_name_that_was_typed_is_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Version, help, usage and hints of `accelerate` speak of `accelerate`, and list what it alone has."""
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    try:
        _commands.main()
    except SystemExit as done:
        assert done.code == (0 if "--help" in words else 2)  # noqa: PT017
    said = "".join(capsys.readouterr())
    name = {
        "launch": "accelerate launch",
        "merge-weight": "accelerate merge-weights",
        "to-fsdp2": "accelerate to-fsdp2",
    }
    assert name.get(words[0], "accelerate ") in said
    assert "accel launch" not in said.partition("Settings come from")[0]
    assert not said.startswith("accel ")
    if words == ["--help"]:
        assert "merge-weights" in said
    if words == ["--version"]:
        assert said == f"accelerate {importlib.metadata.version('accelerate')}\n"


def test_the_launcher_is_a_module_to_run() -> None:
    """`python -m accelerate.commands.launch` shows the options of the launch."""
    words = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--num_processes" in done.stdout.replace("--num-processes", "--num_processes")


def test_configuration_lies_where_it_always_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default file is the original's, and follows HF_HOME."""
    code = "import accelerate.commands.config as c; print(c.default_config_file)"
    monkeypatch.setenv("HF_HOME", "/somewhere")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "/somewhere/accelerate/default_config.yaml"


@pytest.mark.parametrize(("flag", "key"), [("--num_processes", "num_processes"), ("--num-machines", "num_machines")])
def test_long_flags_have_a_key(flag: str, key: str) -> None:
    """A long flag in either spelling has a key in underscores, a short one none."""
    assert _commands.clean_option(flag) == key
    assert _commands.clean_option("-m") is None


def test_both_spellings_of_a_flag_are_taken() -> None:
    """A parser and a group made by their old names take an option with dashes and with underscores."""
    utils = importlib.import_module("accelerate.commands.utils")
    parser = utils.CustomArgumentParser(prog="mine", description="A program.")
    parser.add_argument_group("Numbers").add_argument("--how_many", type=int)
    assert parser.parse_args(["--how-many", "3"]).how_many == parser.parse_args(["--how_many", "3"]).how_many == 3


def test_a_launch_can_be_tried(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that tries a launch sets up the process's state."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    importlib.import_module("accelerate.launchers").test_launch()
    assert importlib.import_module("accelerate").PartialState().num_processes == 1
