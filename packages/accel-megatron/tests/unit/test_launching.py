"""Settings of Megatron-LM: every one is a flag, a variable, an explained row, and what the plugin reads."""

import io
import json
import sys
from pathlib import Path

import pytest

from accel_core.errors import MissingDependencyError
from accel_core.host.environ import patch_environment
from accel_core.options.option import Option, boolean, options_of
from accel_megatron.options import MegatronOptions
from accel_megatron.plugin import MegatronLMPlugin

pytest.importorskip("accel_launch", reason="what the launcher does with these settings")
from accel_launch import cli
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.preview import explanation
from accel_launch.commands.start import settings_from
from accel_launch.settings.checks import check_installed
from accel_launch.settings.child import child_environment
from accel_launch.settings.engines import asked_for
from accel_launch.settings.resolve import Settings

OPTIONS = options_of(MegatronOptions)
WORDS = {"recompute_granularity": "selective", "recompute_method": "block"}


def settings(*words: str) -> Settings:
    """Resolve a command line."""
    return settings_from(launch_command_parser().parse_args(list(words)))


def other(option: Option) -> str:
    """Return a value for an option that is not its default, as somebody types it."""
    if option.parser is boolean:
        return "false" if option.default else "true"
    if option.parser is str:
        return WORDS[option.field]
    return str(option.parser("3") if option.parser is int else 0.25)


def test_there_are_27() -> None:
    """The table has as many options as the original has flags."""
    assert len(OPTIONS) == 27


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_a_flag_reaches_the_plugin(option: Option) -> None:
    """Either spelling parses, is explained with its origin, and the plugin in the process reads what was typed."""
    value = other(option)
    for flag in (option.flag, option.flag.replace("_", "-")):
        said = settings("--use-megatron-lm", "--num-processes", "2", flag, value, "s.py")
        (row,) = [row for row in explanation(said) if row["key"] == option.name]
        assert row["origin"] == "flag"
        assert row["where"].replace("_", "-") == flag.replace("_", "-")
        child = child_environment(said)
        assert child["ACCELERATE_USE_MEGATRON_LM"] == "true"
        with patch_environment(**{name: text for name, text in child.items() if name.startswith("MEGATRON_LM_")}):
            assert getattr(MegatronLMPlugin(), option.field) == option.parser(value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the command an empty home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path


def configure(monkeypatch: pytest.MonkeyPatch, path: Path, *lines: str) -> str:
    """Answer the questions of `accel config`, and return what it asked."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert cli.main(["config", "--config-file", str(path)]) == 0
    return path.read_text()


def explained(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, object]:
    """Return the values that `--explain` shows for a file."""
    capsys.readouterr()
    assert cli.main(["launch", "--config-file", str(path), "--explain", "--json", "s.py"]) == 0
    return {row["key"]: row["value"] for row in json.loads(capsys.readouterr().out)}


def test_questions_about_megatron(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Degrees, micro batches, clipping and the rest are asked about, written, and found again by a launch."""
    answers = ["", "several GPUs", "", "no", "Megatron-LM", "2", "2", "4", "0.5", "yes", "no", "yes"]
    text = configure(monkeypatch, home / "c.yaml", *answers, "8", *[""] * 6)
    assert "distributed_type: MEGATRON_LM" in text
    values = explained(capsys, home / "c.yaml")
    assert values["use_megatron_lm"] is True
    keys = ("tp_degree", "pp_degree", "num_micro_batches", "gradient_clipping")
    assert [values[f"megatron_lm_{key}"] for key in keys] == [2, 2, 4, 0.5]
    keys = ("sequence_parallelism", "recompute_activations", "use_distributed_optimizer")
    assert [boolean(str(values[f"megatron_lm_{key}"])) for key in keys] == [True, False, True]
    chosen = [row["name"] for row in values["engines"] if row["chosen"]]  # type: ignore[attr-defined]
    assert chosen == ["megatron"]


def test_a_dry_run_shows_mesh_and_batch(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages stand outermost, ranks of tensor parallelism side by side; a step has the micro batches."""
    (home / "s.py").touch()
    degrees = ["--megatron-lm-tp-degree", "2", "--megatron-lm-pp-degree", "2", "--megatron-lm-num-micro-batches", "3"]
    assert (
        cli.main(["launch", "--dry-run", "--json", "--num-processes", "8", "--use-megatron-lm", *degrees, "s.py"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["mesh"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 2}
    assert plan["mesh_groups"] == {
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert tuple(plan["batch"].values()) == (None, None, 3, 2)


def test_it_is_refused_without_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run without megatron-core is one error with the place that asked and the command that mends it."""
    said = settings("--use-megatron-lm", "--num-processes", "2", "s.py")
    assert [engine.name for engine in asked_for(said)] == ["megatron"]
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match=r"got none in .*use_megatron_lm from --use.*pip install megatron"):
        check_installed(said)


def test_a_run_may_start_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch tells its processes, a launch inside of them tells its own; a run without the engine gets none."""
    plain = child_environment(settings("--megatron-lm-tp-degree", "2", "s.py"))
    assert not [name for name in plain if "MEGATRON" in name]
    outer = child_environment(settings("--use-megatron-lm", "--num-processes", "2", "s.py"))
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    inner = child_environment(settings("s.py"))
    told = {name for name in outer if name.startswith(("ACCELERATE_", "MEGATRON_LM_"))}
    assert {name: inner[name] for name in told} == {name: outer[name] for name in told}
