"""The other commands: what they print, write and refuse."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError
from accel_core.host.program.run_module import own_command
from accel_launch import selfcheck
from accel_launch.commands.test import words_for
from accel_launch.launchers import registry
from accel_launch.questions.ask import BACK, LineAsker, ask_all
from accel_launch.questions.cluster import CLUSTER
from accel_launch.questions.question import Question
from accel_testing import requires


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the command an empty home, and a folder with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path


def answers(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Put lines on standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["", "several CPU processes", "no", "no", "none", "4", "", "bf16"],
            ["distributed_type: MULTI_CPU", "num_processes: 4", "mixed_precision: bf16"],
        ),
        (
            ["several machines", "several CPU processes", "3", "1", "host", *[""] * 6, "6", "", ""],
            ["compute_environment: LOCAL_MACHINE", "num_machines: 3", "main_process_ip: host"],
        ),
        (["SageMaker", "", "", "role", *[""] * 10, "no"], ["iam_role_name: role"]),
    ],
    ids=["this machine", "several machines", "SageMaker"],
)
def test_config_takes_answers_from_standard_input(
    command, home: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], said: list[str]
) -> None:
    """Lines answer the questions, which follow from the place of the run; the file is at the default place."""
    answers(monkeypatch, *lines)
    command("config")
    text = (home / "home" / "accelerate" / "default_config.yaml").read_text()
    assert all(line in text for line in said)


@requires("engine:fsdp")
def test_config_for_fsdp(home: Path, monkeypatch: pytest.MonkeyPatch, command) -> None:
    """Questions follow the engine; what they give is read by the launcher and shown before it is written."""
    answers(monkeypatch, "", "several GPUs", *[""] * 2, "FSDP", *["2"], *[""] * 40)
    path = home / "fsdp.yaml"
    shown = command("config", "--config-file", str(path)).out
    assert shown.index("distributed_type: FSDP") < shown.index("Wrote")
    shown = command("launch", "--config-file", str(path), "--explain", "--json").out
    rows = {row["key"]: row for row in json.loads(shown)}
    assert (rows["use_fsdp"]["value"], rows["fsdp_version"]["value"]) == (True, "2")
    assert rows["fsdp_version"]["where"].startswith(str(path))


def test_config_for_a_tpu(home: Path, monkeypatch: pytest.MonkeyPatch, command, settings) -> None:
    """Function, pod, precision and a compiler are asked about; the launch takes the TPU's launcher."""
    compiler = ["yes", "inductor", *[""] * 4]
    answers(monkeypatch, "", "TPU", "", *compiler, "8", "train", "no", "bf16", "yes", *[""] * 4)
    path = home / "tpu.yaml"
    command("config", "--config-file", str(path))
    assert "distributed_type: XLA" in path.read_text()
    shown = command("launch", "--config-file", str(path), "--explain", "--json", "s.py").out
    values = {row["key"]: row["value"] for row in json.loads(shown)}
    assert (values["tpu"], str(values["dynamo_backend"]).lower()) == (True, "inductor")
    assert (values["main_training_function"], values["num_processes"]) == ("train", 8)
    said = settings("--config-file", str(path), "s.py")
    assert registry.choose(said).name == "tpu"
    assert registry.choose(said).environ(said)["XLA_DOWNCAST_BF16"] == "1"


@pytest.mark.parametrize(
    ("lines", "told"),
    [((), "Standard input ended"), (("nowhere",), "cannot be answered with 'nowhere'")],
)
def test_config_with_wrong_answers_writes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, command, lines: tuple[str, ...], told: str
) -> None:
    """Missing and wrong answers end with status 2 and no file."""
    answers(monkeypatch, *lines)
    assert told in command("config", status=2).err
    assert not (home / "home").exists()


@requires("engine:fsdp")
def test_config_by_flags(home: Path, command) -> None:
    """--set writes without questions, into groups too, and refuses what no file may say."""
    path = home / "c.yaml"
    words = ["config", "--config-file", str(path), "--set", "num_processes=2", "--set", "fsdp_config.fsdp_version=2"]
    command(*words)
    assert "fsdp_version: 2" in path.read_text()
    assert "Starts 2 processes" in command("launch", "--config-file", str(path), "--cpu", "--explain").out
    said = ""
    for wrong in ("num_processors=2", "num_processes"):
        said += command("config", "--config-file", str(home / "d.yaml"), "--set", wrong, status=2).err
    assert not (home / "d.yaml").exists()
    assert "Did you mean `num_processes`" in said


def test_config_default_and_update(home: Path, command) -> None:
    """`default` writes once; `update` migrates and keeps what the file says."""
    command("config", "default", "--mixed_precision", "bf16")
    assert "left alone" in command("config", "default", status=1).out
    path = home / "old.yaml"
    path.write_text("fp16: true\nnum_processes: 3\ndistributed_type: 'NO'\n")
    command("config", "update", "--config-file", str(path))
    text = path.read_text()
    assert "mixed_precision: fp16" in text
    assert "num_processes: 3" in text
    assert "schema 1" in text
    command("config", "--yes", "--config-file", str(path), "--set", "num_processes=2")
    command("config", "update", "--config-file", str(path))  # an update keeps to what the file says
    assert "Starts 2 processes" in command("launch", "--explain", "--config-file", str(path)).out


@requires("engine:fsdp")
def test_config_by_flags_changes_what_is_said_and_no_more(home: Path, command) -> None:
    """--set merges into a file that is there, says what changes, and keeps the former file beside it."""
    path = home / "c.yaml"
    former = "# mine\nmixed_precision: bf16\nnum_processes: 3\nfsdp_config:\n  fsdp_version: 1\n"
    path.write_text(former)
    words = ["config", "--config-file", str(path), "--yes", "--set", "fsdp_config.fsdp_version=2"]
    changes = command(*words, "--set", "fsdp_config.fsdp_state_dict_type=FULL_STATE_DICT").out
    text = path.read_text()
    assert "mixed_precision: bf16\nnum_processes: 3" in text
    assert "fsdp_version: 2" in text
    assert "fsdp_state_dict_type: FULL_STATE_DICT" in text
    assert "fsdp_config.fsdp_version: 1 -> 2" in changes
    assert (home / "c.yaml.bak").read_text() == former


@pytest.mark.parametrize("words", [["--set", "num_processes=2"], ["default"]])
def test_config_writes_where_a_launch_reads(
    command, home: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """`~`, which a shell leaves alone in `--config-file=~/c.yaml`, is the same folder for whoever writes and reads."""
    monkeypatch.setenv("HOME", str(home / "me"))
    command("config", "--config-file=~/c.yaml", *words)
    assert (home / "me" / "c.yaml").is_file()
    command("launch", "--config-file=~/c.yaml", "--dry-run", "s.py")


def test_config_is_shown_in_whole_and_by_key(home: Path, command) -> None:
    """`show`, `get` and `path` print the file that a launch reads; a key that it lacks is refused with those it has."""
    path = home / "c.yaml"
    for words in (["show"], ["get", "num_processes"], ["path"]):
        assert "There is no default configuration file" in command("config", *words, status=2).err
    path.write_text("num_processes: 3\ndynamo_config: {dynamo_backend: EAGER}\n")
    asked = (["show"], ["get", "dynamo_config.dynamo_backend"], ["path"], ["get", "num_processes"])
    shown = [command("config", *words, "--config-file", str(path)).out for words in asked]
    assert "num_processes: 3" in shown[0]
    assert shown[1:] == ["EAGER\n", f"{path}\n", "3\n"]
    told = command("config", "get", "cores", "--config-file", str(path), status=2).err
    assert "has no cores; got dynamo_config.dynamo_backend, num_processes" in told


def test_config_default_replaces_only_when_told(home: Path, command) -> None:
    """`default` says how it differs from the file that is there; with --yes it replaces that, and keeps it."""
    path = home / "c.yaml"
    path.write_text("num_processes: 3\n")
    for place in (["default", "--config-file", str(path)], ["--config-file", str(path), "default"]):
        assert "num_processes: 3 -> 1" in command("config", *place, status=1).out
        assert path.read_text() == "num_processes: 3\n"
    assert "num_processes: 3 -> 1" in command("config", "--config-file", str(path), "default", "--yes").out
    assert (home / "c.yaml.bak").read_text() == "num_processes: 3\n"
    assert "num_processes: 1" in path.read_text()


def test_config_update_keeps_to_the_file_that_was_named(home: Path, command) -> None:
    """A file named before or after `update` is the one that is read and written; a damaged one is left alone."""
    command("config", "default")
    default = home / "home" / "accelerate" / "default_config.yaml"
    before = default.read_text()
    bad = home / "bad.yaml"
    bad.write_text("use_cpu: [\n")
    for words in (["--config-file", str(bad), "update"], ["update", "--config-file", str(bad)]):
        assert "bad.yaml" in command("config", *words, status=2).err
    bad.write_text("fp16: true\n")
    command("config", "--config-file", str(bad), "update")
    assert "mixed_precision: fp16" in bad.read_text()
    assert "num_processes" not in bad.read_text()
    assert default.read_text() == before
    assert (home / "bad.yaml.bak").read_text() == "fp16: true\n"


def test_config_update_refuses_nonsense_and_keeps_every_copy(home: Path, command) -> None:
    """A value that is not valid is named and nothing is written; a second update overwrites no copy of the first."""
    path = home / "c.yaml"
    for wrong, told in (("num_processes: banana\n", "got 'banana'"), ("machine_rank: 9\n", "machine_rank is less")):
        path.write_text(wrong)
        assert told in command("config", "update", "--config-file", str(path), status=2).err
        assert path.read_text() == wrong
        assert not (home / "c.yaml.bak").exists()
    for precision in ("fp16", "bf16"):
        path.write_text(f"mixed_precision: {precision}\n")
        command("config", "update", "--config-file", str(path))
    assert "Nothing changes." in command("config", "update", "--config-file", str(path)).out
    assert (home / "c.yaml.bak").read_text() == "mixed_precision: fp16\n"
    assert (home / "c.yaml.bak1").read_text() == "mixed_precision: bf16\n"
    assert not (home / "c.yaml.bak2").exists()


@pytest.mark.parametrize(
    ("source", "words", "told"),
    [
        ("", ["s.py", "--num-processes", "2"], "write it before: accel launch --num-processes 2 s.py"),
        ("", ["s.py", "--num_processes=2"], "write it before: accel launch --num_processes=2 s.py"),
        ("add('--num_processes')", ["s.py", "--num-processes", "2"], ""),
        ('option("-n", "--num-processes/--one")', ["s.py", "--num_processes", "2"], ""),
        ("def main(*, num_processes=2): ...", ["s.py", "--num-processes", "2"], ""),
        ("class Options:\n    num_processes: int = 2", ["s.py", "--num-processes", "2"], ""),
        ("print(f'{accelerator.num_processes: >3}')", ["s.py", "--num-processes", "2"], "write it before"),
        ("num_processes = a.num_processes", ["s.py", "--num-processes", "2"], "write it before"),
        ("add('--machines')", ["s.py", "--machines", "2"], ""),
        ("", ["s.py", "--lr", "2"], ""),
        ("", ["--gpu-ids", "2,3", "s.py"], "got '2,3' from --gpu-ids, of which it has none. The run uses the CPU"),
        ("", ["--gpu-ids", "1,2", "s.py"], "got '1,2' from --gpu-ids, of which it has 1. The run uses no others"),
        ("", ["--gpu-ids", "0,1", "s.py"], ""),
        ("", ["--cpu", "--gpu-ids", "2,3", "s.py"], ""),
    ],
)
def test_slips_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, command, source: str, words: list[str], told: str
) -> None:
    """A flag after the script, which it does not know itself, and GPUs that are not here: one warning with the fix."""
    monkeypatch.setattr("accel_launch.settings.devices._present", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which gpu_ids overrides
    (home / "s.py").write_text(source)
    said = command("launch", "--dry-run", *words).err
    assert told in said
    assert said.count("\n") == bool(told)


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (
            ["--zero-stage", "2"],
            {},
            "--zero-stage has no effect: it is for DeepSpeed, which these settings do not use.",
        ),
        (["--fp8-backend", "te"], {}, "--fp8-backend has no effect: it is for FP8, which"),
        (["--slurm", "time=10"], {}, "--slurm has no effect: it is for SLURM, which"),
        (["--launcher", "slurm", "--address", "auto"], {}, "--address has no effect: it is for Ray, which"),
        (["--use-fsdp"], {}, "use_fsdp from --use-fsdp shards a model over processes; got 1. Pass --num-processes."),
        (
            [],
            {"ACCELERATE_MIXED_PRECISON": "bf16"},
            "ACCELERATE_MIXED_PRECISON. Did you mean ACCELERATE_MIXED_PRECISION?",
        ),
        (["--use-fsdp", "--fsdp-version", "2", "-n", "2"], {"ACCELERATE_ELSEWHERE": "1"}, ""),
        (["--mixed-precision", "BF16", "--standalone"], {}, ""),
        (["--config-file", "f.yaml", "--cpu"], {}, "trains without FSDP; pass --use-fsdp as well"),
        (["--config-file", "f.yaml", "--cpu", "--use-fsdp"], {}, ""),
        (["--config-file", "f.yaml"], {}, ""),
    ],
)
@requires("engine:fsdp", "engine:deepspeed")
def test_what_has_no_effect_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, command, words: list[str], variables: dict[str, str], told: str
) -> None:
    """Options of an engine or a launcher that is not used, shards over one process, a misspelled variable.

    A file's engine does not count where the command line chooses hardware.
    """
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (home / "f.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    said = command("launch", "--dry-run", *words, "s.py").err
    assert told in said
    assert said.count("\n") == bool(told)


def test_a_variable_over_a_file_is_told(home: Path, monkeypatch: pytest.MonkeyPatch, command) -> None:
    """Processes of a launch have such variables, so a launch that they start would leave its file without a word."""
    (home / "c.yaml").write_text("use_cpu: true\nmixed_precision: bf16\n")
    for name, value in {"USE_CPU": "True", "MIXED_PRECISION": "no", "DYNAMO_BACKEND": "no"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    (line,) = command("launch", "--config-file", "c.yaml", "--dry-run", "s.py").err.splitlines()
    assert "ACCELERATE_MIXED_PRECISION outweighs" in line
    assert "mixed_precision is 'no', not 'bf16' from c.yaml:2" in line
    assert command("launch", "--config-file", "c.yaml", "--mixed-precision", "fp16", "--dry-run", "s.py").err == ""


def test_explain_shows_what_is_set_and_what_would_start(home: Path, command) -> None:
    """Defaults are left to --all; the number of processes comes with the setting that decides it; keys are hidden."""
    words = ["launch", "--explain", "--cpu", "--num-processes", "2", "--aws-secret-access-key", "hush", "s.py"]
    shown = command(*words).out
    assert "Starts 2 processes on 1 machine: num_processes from --num-processes." in shown
    assert re.search(r"^  cpu +True +flag: --cpu$", shown, re.MULTILINE)
    assert re.search(r"^  aws_secret_access_key +\(hidden\) ", shown, re.MULTILINE)
    assert not [word for word in ("rdzv_backend", "explain", "hush") if word in shown]
    assert "rdzv_backend" in command(*words[:2], "--all", *words[2:]).out


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("num_processes", "-4", "a whole number from 1"),
        ("num_machines", "0", "a whole number from 1"),
        ("gpu_ids", "abc", "comma-separated numbers from 0"),
        ("main_process_port", "70000", "a port from 0 to 65535"),
    ],
)
def test_every_source_is_checked_alike(
    home: Path, monkeypatch: pytest.MonkeyPatch, command, key: str, text: str, wanted: str
) -> None:
    """A flag, a variable, a file, --set and an answer are refused for one reason, with the place that says it."""
    flag = f"--{key.replace('_', '-')}"
    path = home / "c.yaml"
    path.write_text(f"debug: false\n{key}: {text}\n")
    expected = f"{key} is not valid; got '{text}' from"

    def told(*words: str) -> str:
        said = command(*words, status=2).err
        assert wanted in said
        return said

    assert f"{expected} {flag}." in told("launch", f"{flag}={text}", "s.py")
    assert f"{expected} {path}:2." in told("launch", "--config-file", str(path), "s.py")
    assert f"{expected} --set." in told("config", "--config-file", str(home / "new.yaml"), "--set", f"{key}={text}")
    assert not (home / "new.yaml").exists()
    monkeypatch.setenv(f"ACCEL_{key.upper()}", text)
    assert f"{expected} the variable ACCEL_{key.upper()}." in told("launch", "s.py")
    with pytest.raises(ConfigurationError, match=f"{expected} the answer"):
        next(question for question in CLUSTER if question.key == key).answer(text)


def test_going_back_asks_again() -> None:
    """`<` returns to the question before, and what followed from it is forgotten."""
    questions = (
        Question("kind", "Kind?", ("a", "b"), "a"),
        Question("only_a", "Only for a?", default="x", when=lambda found: found["kind"] == "a"),
        Question("last", "Last?", default="z"),
    )
    asker = LineAsker(io.StringIO(f"a\none\n{BACK}\n{BACK}\nb\n\n"))
    assert ask_all(questions, asker) == {"kind": "b", "last": "z"}


def test_tpu_config_prints_the_command(home: Path, command) -> None:
    """--debug shows the command line that reaches every machine of the pod; a missing name is refused."""
    (home / "do.txt").write_text("echo one\necho two\n")
    words = ["tpu-config", "--tpu_zone", "z", "--command_file", str(home / "do.txt"), "--install-accelerate", "--debug"]
    shown = command(*words, "--tpu_name", "pod").out
    run = "cd /usr/share; pip install accelerate -U; echo one; echo two"
    assert f"ssh pod --zone z --command '{run}' --worker all" in shown
    assert "--tpu-name" in command(*words, status=2).err


@requires("engine:fsdp")
def test_completion_knows_commands_options_and_choices(command) -> None:
    """The shell gets commands, then options, then an option's choices."""
    cases = {
        "lau": "launch",
        "launch --mixed-p": "--mixed-precision",
        "launch --mixed-precision b": "bf16",
        "launch tr": "",
        "config upd": "update",
        "config default --mixed-precision f": "fp16",
        "completion z": "zsh",
    }
    for words, expected in cases.items():
        assert command("completion", "--words", *words.split()).out == f"{expected}\n"
    assert command("completion", "--words", "launch", "--fsdp-ver").out == "--fsdp-version\n"
    assert "No shell was named" in command("completion", status=2).err
    for shell in ("bash", "zsh", "fish"):
        assert "accel completion --words" in command("completion", shell).out


def test_check_uses_two_cpu_processes_without_a_configuration(home: Path) -> None:
    """`accel test` starts two CPU processes unless a configuration or a number says otherwise."""
    check = own_command("accel_launch.selfcheck")[1:]
    assert words_for(None, None) == ["--cpu", "--num-processes", "2", *check]
    assert words_for("c.yaml", 3) == ["--config-file", "c.yaml", "--num-processes", "3", *check]


def test_the_file_of_the_variable_is_the_one_that_is_checked(
    home: Path, monkeypatch: pytest.MonkeyPatch, command
) -> None:
    """What ACCEL_CONFIG_FILE names takes the default file's place in every command, not in a launch alone."""
    (home / "c.yaml").write_text("num_processes: 3\nfp16: true\n")
    monkeypatch.setenv("ACCEL_CONFIG_FILE", str(home / "c.yaml"))
    assert words_for(None, None) == own_command("accel_launch.selfcheck")[1:]
    command("config", "update")
    assert "mixed_precision: fp16" in (home / "c.yaml").read_text()
    monkeypatch.setenv("ACCEL_CONFIG_FILE", "none.yaml")
    assert "none.yaml does not exist" in command("launch", "--dry-run", "s.py", status=2).err
    monkeypatch.setenv("ACCEL_CONFIG_FILE", "")  # as every variable that is empty
    command("launch", "--dry-run", "s.py")


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_check_holds_in_each_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    """Training in a shorter number format is alike within its own rounding."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    selfcheck.main()
    assert capsys.readouterr().out.endswith("training is alike: holds for 1 process on cpu\n")


@requires("engine:deepspeed")
def test_dry_run_shows_machines_mesh_and_batch(home: Path, command) -> None:
    """--dry-run gives command, environment and ranks of every machine, the mesh and the batch, and starts nothing."""
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {}}
    (home / "ds.json").write_text(json.dumps(given))
    words = ["launch", "--dry-run", "--json", "--num-processes", "4", "--num-machines", "2", "--machine-rank", "0"]
    words += ["--main-process-ip", "h", "--main-process-port", "1"]
    words += ["--use-deepspeed", "--deepspeed-multinode-launcher", "standard"]
    plan = json.loads(command(*words, "--deepspeed-config-file", str(home / "ds.json"), "s.py", "x").out)
    assert [machine["ranks"] for machine in plan["machines"]] == [[0, 1], [2, 3]]
    assert "--node-rank=1" in plan["machines"][1]["command"]
    assert plan["machines"][0]["environment"]["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert plan["effective_batch"] == 2 * 4 * 4
    assert plan["batch"] == {"samples": 32, "per_process": 2, "accumulated": 4, "data_parallel": 4}
    shown = command("launch", "--dry-run", "--cpu", "s.py").out
    assert shown.startswith("Launcher simple: 1 process on 1 machine.\nMesh: dp 1\n")
    assert shown.endswith("Nothing was started.\n")


MESH = ["--use-fsdp", "--fsdp-version", "2", "--use-parallelism-config"]
SHARDED = ["--parallelism-config-dp-shard-size", "2"]


@pytest.mark.parametrize(
    ("words", "mesh", "groups", "batch"),
    [
        (["--num-processes", "4"], {"dp": 4}, {"dp": [[0, 1, 2, 3]]}, (None, None, None, 4)),
        (
            ["--num-processes", "4", *MESH, *SHARDED, "--parallelism-config-tp-size", "2"],
            {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "ep": 1, "cp": 1, "sp": 1, "tp": 2},
            {"dp_shard": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]},
            (None, None, None, 2),
        ),
        (
            ["--num-processes", "4", *MESH, "--parallelism-config-tp-size", "2"],
            {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "ep": 1, "cp": 1, "sp": 1, "tp": 2},
            {"tp": []},
            (None, None, None, 1),
        ),
        (
            ["--num-processes", "2", "--use-deepspeed", "--gradient-accumulation-steps", "8"],
            {"dp": 2},
            {"dp": [[0, 1]]},
            (None, None, 8, 2),
        ),
        (
            ["--num-processes", "2", "--use-deepspeed", "--deepspeed-config-file", "total.json"],
            {"dp": 2},
            {"dp": [[0, 1]]},
            (64, None, None, 2),
        ),
        (
            ["--num-processes", "2", "--use-deepspeed", "--deepspeed-config-file", "auto.json"],
            {"dp": 2},
            {"dp": [[0, 1]]},
            (None, None, None, 2),
        ),
    ],
)
@requires("engine:fsdp", "engine:deepspeed")
def test_dry_run_knows_mesh_and_batch(
    home: Path,
    command,
    words: list[str],
    mesh: dict[str, int],
    groups: dict[str, list[list[int]]],
    batch: tuple[int | None, int | None, int | None, int],
) -> None:
    """Axes, the ranks along each, and the parts of a step's batch follow from flags and files; the rest is unknown."""
    (home / "total.json").write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {}}))
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    (home / "auto.json").write_text(json.dumps({**dict.fromkeys(auto, "auto"), "zero_optimization": {}}))
    plan = json.loads(command("launch", "--dry-run", "--json", *words, "s.py").out)
    assert (plan["mesh"], plan["mesh_groups"]) == (mesh, groups)
    assert tuple(plan["batch"].values()) == batch
    shown = command("launch", "--dry-run", *words, "s.py").out
    assert ("unknown, the script decides the batch per process" in shown) == (batch[0] is None)
    assert ("do not hold" in shown) == (groups == {"tp": []})


def test_accumulation_of_the_environment_is_known(monkeypatch: pytest.MonkeyPatch, command) -> None:
    """Accumulated batches that the script will read from its environment count in every kind of run."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    shown = command("launch", "--dry-run", "--cpu", "--num-processes", "2", "s.py").out
    assert "x 2 data-parallel processes x 4 accumulated" in shown
