"""Settings of DeepSpeed runs: file, hosts and filters are checked before anything starts, with both places named."""

import importlib
import json
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError

pytest.importorskip("accel_launch", reason="what the launcher does for a run with DeepSpeed")
from accel_deepspeed.launching.hosts import launcher_of
from accel_launch import cli
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.questions.dialogue import hold_dialogue
from accel_launch.questions.question import Question
from accel_launch.settings.batch import batch_of
from accel_launch.settings.checks import check_installed, check_settings
from accel_launch.settings.child import child_environment
from accel_launch.settings.file import write
from accel_launch.settings.resolve import Settings

MACHINES = ["--num-machines", "2", "--num-processes", "4"]
HOSTS = "# two hosts\nw0 slots=2\n\nw1 slots=2 # fast\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a hostfile, without a default configuration."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(HOSTS)
    return tmp_path


def run_of(*words: str) -> Settings:
    """Return the settings of a DeepSpeed run."""
    return settings_from(launch_command_parser().parse_args(["--use-deepspeed", *words, "s.py"]))


def refusal(*words: str) -> str:
    """Return the message with which a DeepSpeed run is refused."""
    with pytest.raises(ConfigurationError) as caught:
        check_settings(run_of(*words))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        ({"bf16": {"enabled": True}}, ["--mixed-precision", "fp16"], "bf16.enabled = true from ds.json"),
        ({"zero_optimization": {"stage": 3}}, ["--zero-stage", "2"], "zero_optimization.stage = 3 from ds.json"),
        ({"gradient_accumulation_steps": 4}, ["--gradient-accumulation-steps", "2"], "gradient_accumulation_steps = 4"),
        ({"gradient_clipping": 1.0}, ["--gradient-clipping", "0.5"], "gradient_clipping = 1.0"),
    ],
)
def test_file_and_flag_conflict(folder: Path, config: dict, words: list[str], told: str) -> None:
    """A key that the DeepSpeed file and a flag set differently is an error that names both; "auto" is none."""
    path = folder / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {}, **config}))
    message = refusal("--deepspeed-config-file", "ds.json", *words)
    assert told in message
    assert f"got {words[1]} from {words[0]}" in message
    for agreeing in ({}, {key: "auto" for key in config if not isinstance(config[key], dict)}):
        path.write_text(json.dumps({"zero_optimization": {}, **agreeing}))
        check_settings(run_of("--deepspeed-config-file", "ds.json", *words))


@pytest.mark.parametrize(
    ("config", "precision", "steps"),
    [
        ({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}, "bf16", 4),
        ({"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto"}, "no", None),
        ({}, "no", None),
    ],
)
def test_processes_get_what_the_file_decides(folder: Path, config: dict, precision: str, steps: int | None) -> None:
    """The file's precision is that of the run; a key that is not there leaves the number of batches to the script."""
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {}, **config}))
    settings = run_of("--deepspeed-config-file", "ds.json")
    assert child_environment(settings)["ACCELERATE_MIXED_PRECISION"] == precision
    assert batch_of(settings).accumulated == steps


FILE = ["--deepspeed-config-file", "ds.json"]
OFFLOADED = '{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}'
OVER_HOSTS = [*MACHINES, "--deepspeed-hostfile", "hosts", "--deepspeed-multinode-launcher"]


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("{", FILE, "is not JSON"),
        (None, FILE, "cannot be read"),
        ("[1]", FILE, "holds keys and values; got [1] in ds.json"),
        (None, ["--cpu", "--mixed-precision", "fp8"], "got fp8 from --mixed-precision, and cpu from --cpu"),
        (
            '{"zero_optimization": {}, "fp16": {"enabled": true}}',
            [*FILE, "--cpu"],
            "got fp16 from ds.json: fp16.enabled, and cpu from --cpu",
        ),
        (None, ["--offload-param-device", "nvme"], "nvme from --offload-param-device, and no offload_param_nvme_path"),
        (
            OFFLOADED,
            FILE,
            "nvme from ds.json: zero_optimization.offload_optimizer.device, and no offload_optimizer_nvme_path",
        ),
        (None, MACHINES, "reads its hosts from a hostfile; got none for 2 machines"),
        (None, [*MACHINES, "--deepspeed-hostfile", "nowhere"], "The hostfile cannot be read; nowhere gives"),
        (None, [*MACHINES, "--deepspeed-hostfile", "three"], "got 3 hosts in three, and 2 machines"),
        (None, [*OVER_HOSTS, "mvapich", "--deepspeed-hostfile", "uneven"], "got w1 slots=3 in uneven"),
        (None, [*OVER_HOSTS, "slurm", "--module"], "slurm starts a Python file; got --module"),
        (None, [*OVER_HOSTS, "nossh"], "got no --main-process-ip and no --machine-rank"),
        (
            None,
            [*OVER_HOSTS, "standard"],
            "got no --main-process-ip and no --main-process-port and no --machine-rank",
        ),
    ],
)
def test_what_a_run_cannot_be_made_of_is_told(folder: Path, text: str | None, words: list[str], told: str) -> None:
    """Broken files, half precision on a CPU, a disk without a folder, and hosts that do not fit are refused."""
    (folder / "three").write_text("w0 slots=2\nw1 slots=2\nw2 slots=2\n")
    (folder / "uneven").write_text("w0 slots=2\nw1 slots=3\n")
    if text is not None:
        (folder / "ds.json").write_text(text)
    assert told in refusal(*words)


def test_a_scheduler_starts_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun every machine runs the launcher already, so that DeepSpeed reaches none unless it is asked to."""
    assert launcher_of(run_of(*MACHINES)) == "pdsh"
    slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    for name, value in {**slurm, "SLURM_STEP_NODELIST": "w[0-1]", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    settings = run_of("--nproc-per-node", "2")
    check_settings(settings)
    assert launcher_of(settings) is None
    assert launcher_of(run_of("--deepspeed-multinode-launcher", "slurm")) == "slurm"


def test_a_library_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run whose ranks could not import DeepSpeed is refused, but where another program than Python is started."""
    importlib.import_module("packaging.version")  # found now, and not on the path that follows
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match=r"got none in .* and use_deepspeed from --use-deepspeed"):
        check_installed(run_of("--num-processes", "2"))
    check_installed(run_of("--num-processes", "2", "--no-python"))
    check_installed(run_of(*MACHINES, "--deepspeed-hostfile", "hosts"))
    info = tmp_path / "deepspeed-0.19.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    check_installed(run_of("--num-processes", "2"))


def test_explain_shows_what_the_deepspeed_file_decides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--explain names the place in DeepSpeed's file, and what it sets aside."""
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}')
    words = ["--use-deepspeed", "--deepspeed-config-file", "ds.json", "--gradient-clipping", "0.5"]
    assert cli.main(["launch", "--explain", "--json", *words, "s.py"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    stage = rows["zero_stage"]
    assert (stage["value"], stage["origin"], stage["where"]) == (
        3,
        "deepspeed file",
        "ds.json: zero_optimization.stage",
    )
    assert (rows["gradient_clipping"]["value"], rows["gradient_clipping"]["where"]) == (0.5, "--gradient-clipping")
    assert rows["deepspeed_config_file"]["where"] == "--deepspeed-config-file"


class Answers:
    """Somebody who answers some questions, and presses return for the others."""

    person = False

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def ask(self, question: Question) -> str:
        """Answer one question."""
        self.asked.append(question.key)
        return self.answers.get(question.key, "")

    def told(self, message: str) -> None:
        """Fail: every answer is valid."""
        raise AssertionError(message)


CPUS = {"kind": "several CPU processes", "engine": "DeepSpeed"}
TWO = {"compute_environment": "several machines", "num_machines": "2", "main_process_ip": "h"}
OWN_FILE = {"own_deepspeed_file": "yes", "deepspeed_config_file": "ds.json"}


@pytest.mark.parametrize(
    ("answers", "asked", "config"),
    [
        (
            {"zero_stage": "3", "offload_param_device": "nvme", "offload_param_nvme_path": "/disk"},
            {"offload_param_nvme_path"},
            {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/disk"},
        ),
        (
            {
                **TWO,
                "deepspeed_hostfile": "hosts",
                "deepspeed_inclusion_filter": "w0",
            },
            {"deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_inclusion_filter"},
            {"deepspeed_multinode_launcher": "pdsh", "deepspeed_hostfile": "hosts", "deepspeed_inclusion_filter": "w0"},
        ),
        (
            {**TWO, "deepspeed_multinode_launcher": "standard"},
            {"deepspeed_multinode_launcher"},
            {"deepspeed_multinode_launcher": "standard"},
        ),
        (
            {
                **OWN_FILE,
                "deepspeed_moe_layer_cls_names": "Experts",
            },
            {"deepspeed_config_file"},
            {"deepspeed_config_file": "ds.json", "deepspeed_moe_layer_cls_names": "Experts"},
        ),
    ],
)
def test_questions_lead_to_a_file_that_launches(
    folder: Path, answers: dict[str, str], asked: set[str], config: dict[str, object]
) -> None:
    """Each answer that matters is asked for, no other, and the file that they make is one that a launch takes."""
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    asker = Answers(**CPUS, **answers)
    found = hold_dialogue(asker)
    depending = {"offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_config_file"}
    depending |= {key for key in asker.asked if key.startswith("deepspeed_")} - {"deepspeed_moe_layer_cls_names"}
    assert depending & set(asker.asked) == asked
    assert config.items() <= found["deepspeed_config"].items()
    write(found, folder / "made.yaml")
    settings = settings_from(launch_command_parser().parse_args(["--config-file", "made.yaml", "s.py"]))
    check_settings(settings)
    assert settings["use_deepspeed"]
