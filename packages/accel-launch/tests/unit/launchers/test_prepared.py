"""Launchers whose machines are not here: what they would start, and what they say without them."""

import json
import sys
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError, LaunchError, MissingDependencyError
from accel_core.host.program.run_module import own_command
from accel_core.options.engines import engines
from accel_launch.launchers import registry
from accel_launch.launchers.mpi import flavor
from accel_launch.launchers.preflight import check_agreement, facts_of_machine
from accel_launch.launchers.sagemaker import hyperparameters
from accel_launch.launchers.tpu import TpuLauncher
from accel_launch.launchers.xla_processes import find_function

SAGEMAKER = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p3.16xlarge
iam_role_name: role
mixed_precision: fp16
num_machines: 2
region: eu-west-1
"""


def test_sagemaker_job_is_prepared_and_says_what_is_missing(settings, tmp_path: Path) -> None:
    """The job's description is complete; without the library the run says so and names --dry-run."""
    (tmp_path / "sm.yaml").write_text(SAGEMAKER)
    said = settings("--config-file", str(tmp_path / "sm.yaml"), "src/train.py", "--lr", "1e-3", "--epochs", "2")
    launcher = registry.choose(said)
    assert launcher.name == "sagemaker"
    job = json.loads(launcher.command(said)[1])
    assert (job["entry_point"], job["source_dir"], job["instance_count"]) == ("train.py", "src", 2)
    assert job["hyperparameters"] == {"lr": 0.001, "epochs": 2}
    assert job["environment"]["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert job["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    with pytest.raises(MissingDependencyError, match="AWS account"):
        launcher.run(said)


def test_sagemaker_words_come_in_pairs() -> None:
    """A switch without a value cannot be passed on and is refused."""
    assert hyperparameters(["--name", "x", "--flag", "true"]) == {"name": "x", "flag": True}
    with pytest.raises(ConfigurationError, match="'--fast'"):
        hyperparameters(["--fast", "--lr", "1"])


def test_tpu_command_and_missing_library(settings, tmp_path: Path) -> None:
    """A TPU run names the training function; a pod reaches its machines; both need torch-xla."""
    said = settings("--tpu", "--main-training-function", "train", "--mixed-precision", "bf16", "s.py", "a")
    launcher = registry.choose(said)
    own = own_command("accel_launch.launchers.xla_processes", "--function", "train")
    assert launcher.command(said) == [*own, "s.py", "a"]
    assert launcher.environ(said)["XLA_USE_BF16"] == "1"
    with pytest.raises(MissingDependencyError, match="torch_xla"):
        launcher.run(said)
    (tmp_path / "pod.yaml").write_text("distributed_type: XLA\ntpu_name: pod\ntpu_use_cluster: true\ntpu_vm: [v1]\n")
    pod = settings("--config-file", str(tmp_path / "pod.yaml"), "s.py")
    words = TpuLauncher().command(pod)
    assert words[2:7] == ["torch_xla.distributed.xla_dist", "--tpu", "pod", "--vm", "v1"]
    assert words[words.index("--") + 1 : words.index("--") + 3] == ["accel", "launch"]


def test_pod_without_a_name_is_refused(settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod without a name is refused before its program starts."""
    (tmp_path / "pod.yaml").write_text("distributed_type: XLA\ntpu_name: ''\ntpu_use_cluster: true\n")
    monkeypatch.setattr(type(engines()["xla"]), "require", lambda library: None)
    with pytest.raises(ConfigurationError, match="reached by its name; got '' as tpu_name"):
        TpuLauncher().run(settings("--config-file", str(tmp_path / "pod.yaml"), "s.py"))


def test_training_function_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that TPU processes run is found in the script, or refused by name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "accel_tpu_script.py").write_text("def main():\n    return 7\n")
    assert find_function(str(tmp_path / "accel_tpu_script.py"), "main")() == 7
    with pytest.raises(ConfigurationError, match="has no function `train`"):
        find_function(str(tmp_path / "accel_tpu_script.py"), "train")
    sys.modules.pop("accel_tpu_script", None)


def test_mpi_of_unknown_make_is_refused(tmp_path: Path) -> None:
    """The flags depend on the MPI; one that is not known is refused with what it says."""
    program = tmp_path / "mpirun"
    for said, expected in (
        ("mpirun (Open MPI) 5.0", "Open MPI"),
        ("Intel(R) MPI Library", "Intel"),
        ("HYDRA build", "HYDRA"),
    ):
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
        assert flavor(str(program)) == expected
    program.write_text("#!/bin/sh\necho strange\n")
    with pytest.raises(ConfigurationError, match="strange"):
        flavor(str(program))


def test_mpi_without_mpirun_is_told(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostfile without mpirun on PATH names what to install."""
    monkeypatch.setenv("PATH", "/nonexistent")
    said = settings("--mpirun-hostfile", "hosts", "--num-processes", "2", "s.py")
    with pytest.raises(MissingDependencyError, match="mpirun or mpiexec"):
        registry.choose(said).command(said)


class Store(dict[str, str]):
    """A key-value store of one process."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self[key] = value

    def get(self, key: str) -> str:  # type: ignore[override]
        """Return a value."""
        return self[key]


@pytest.mark.parametrize("name", ["python", "torch", "accel-core", "script", "processes"])
def test_machines_must_agree(tmp_path: Path, name: str) -> None:
    """Machines with other versions, scripts or numbers of processes are refused by name."""
    (tmp_path / "s.py").write_text("pass")
    facts = facts_of_machine(str(tmp_path / "s.py"), 4)
    store = Store({"accel/facts/0": json.dumps(facts), "accel/facts/1": json.dumps(facts)})
    check_agreement(store, 1, 2, facts, elastic=False)
    with pytest.raises(LaunchError, match=f"differ in {name}.*other.*machine 1"):
        check_agreement(store, 1, 2, {**facts, name: "other"}, elastic=False)


def test_third_parties_launcher_is_asked_first(settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A launcher offered by entry point starts what it claims."""
    (tmp_path / "mine_launcher.py").write_text(
        "from accel_launch.launchers.tpu import TpuLauncher\n\n\nclass Mine(TpuLauncher):\n    name = 'mine'\n\n"
        "    def claims(self, settings):\n        return settings['num_processes'] == 7\n"
    )
    assert registry.choose(settings("--cpu", "--num-processes", "7", "s.py")).name == "torchrun"
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[accel.launchers]\nmine = mine_launcher:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.choose(settings("--cpu", "--num-processes", "7", "s.py")).name == "mine"
    assert registry.choose(settings("--cpu", "s.py")).name == "simple"
