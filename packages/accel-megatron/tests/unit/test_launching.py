"""Settings of Megatron-LM and of TPUs: every one is a flag, a variable, an explained row, and what the plugin reads."""

import io
import json
import sys
from pathlib import Path

import pytest

from accel_core.host.environ import patch_environment
from accel_core.options.option import Option, boolean, options_of
from accel_megatron.options import MegatronOptions
from accel_megatron.plugin import MegatronLMPlugin

pytest.importorskip("accel_launch", reason="what the launcher does with these settings")
from accel_launch import cli
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.preview import explanation
from accel_launch.commands.start import settings_from
from accel_launch.launchers import registry
from accel_launch.settings.child import child_environment
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


def test_nothing_of_it_reaches_other_runs() -> None:
    """Without the engine its variables stay away, whatever was typed."""
    child = child_environment(settings("--megatron-lm-tp-degree", "2", "s.py"))
    assert not [name for name in child if "MEGATRON" in name]


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
    answers = ["", "several GPUs", "", "", "no", "Megatron-LM", "2", "2", "4", "0.5", "yes", "no", "yes"]
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


def test_questions_about_a_tpu(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Function, pod, precision and a compiler for XLA are asked about; the launch takes the TPU's launcher."""
    answers = ["", "TPU", "", "", "yes", "torchxla_trace_once", *[""] * 4, "8", "train", "no", "bf16", "yes"]
    text = configure(monkeypatch, home / "c.yaml", *answers, *[""] * 4)
    assert "distributed_type: XLA" in text
    values = explained(capsys, home / "c.yaml")
    assert values["tpu"] is True
    assert str(values["dynamo_backend"]).lower() == "torchxla_trace_once"
    assert (values["main_training_function"], values["num_processes"]) == ("train", 8)
    said = settings("--config-file", str(home / "c.yaml"), "s.py")
    assert registry.choose(said).name == "tpu"
    assert registry.choose(said).environ(said)["XLA_DOWNCAST_BF16"] == "1"
