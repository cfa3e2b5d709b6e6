"""Words mean to the processes what they mean in the original; every difference is listed here with its reason."""

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.options.engines import absent
from accel_launch.commands.launch import launch_command_parser
from accel_launch.launchers.registry import choose
from accel_launch.settings import child
from accel_launch.settings.checks import check_script, check_settings
from accel_launch.settings.resolve import Settings
from accel_testing import requires

HERE = Path(__file__).parents[1] / "peer"
WORDS: dict[str, list[str]] = json.loads((HERE / "words.json").read_text())
PEER: dict[str, dict[str, Any]] = json.loads((HERE / "accelerate-1.15.0.json").read_text())

NOT_REFUSED = {
    "case cpu_fsdp": "FSDP runs on a CPU here",
    "case fsdp_mg": "--multi_gpu says nothing that --use_fsdp contradicts",
    "case multi_two": "--multi_gpu says nothing that --use_deepspeed contradicts",
    "case par": "an axis mesh is not bound to FSDP2",
    "tpu_cluster": "the original needs torch-xla to look at a pod",
}
"""What the original refuses and accel does not."""

REFUSED = {
    "case np0": "a whole number from 1",
    "case ds_nolauncher": "reads its hosts from a hostfile",
}
"""What the original takes and accel refuses."""

MORE_PROCESSES = "accel really starts the processes that were asked for"
OTHER_KIND = {
    **dict.fromkeys(["case cpu2", "case np2", "case cpu4", "case cpum"], MORE_PROCESSES),
    **dict.fromkeys(["num_processes", "file multicpu_plain", "file multigpu + cpu"], MORE_PROCESSES),
    "case npneg": "refused",
}
"""Cases that start another way than in the original."""

ALWAYS_MORE = {
    "ACCELERATE_USE_CPU": "the original leaves it out when it starts several processes",
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "the original has the option in files and in code, but no flag",
    "PARALLELISM_CONFIG_EP_SIZE": "the original has no axis for experts",
    "PARALLELISM_CONFIG_PP_SIZE": "the original has no axis for pipelines",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "None is not written as text",
}
DYNAMO = "the original forgets compilation under DeepSpeed"
MORE: dict[str, dict[str, str]] = {
    "offload_optimizer_nvme_path": {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "the original loses the path"},
    "offload_param_nvme_path": {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "the original loses the path"},
    "case nv1": {
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "the original loses the path",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "the original loses the path",
    },
    "file nodes": {"ACCELERATE_CPU_AFFINITY": "the original loses what the file says"},
    "file nodes + rank": {"ACCELERATE_CPU_AFFINITY": "the original loses what the file says"},
    "file oldint": {"FSDP_BACKWARD_PREFETCH": "the old key is migrated"},
}
"""Variables that accel writes and the original does not."""

OTHER_VALUE: dict[tuple[str, str], str] = {
    ("case megf", "MEGATRON_LM_NO_LOAD_OPTIM"): "false means false",
    ("case casefsdp", "FSDP_STATE_DICT_TYPE"): "names are written in capitals",
    ("case fsdp_int", "FSDP_SHARDING_STRATEGY"): "the number becomes its name",
    ("case fsdp_int", "FSDP_AUTO_WRAP_POLICY"): "names are written in capitals",
    ("case sdpa", "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"): "false means false",
    ("file oldint", "FSDP_SHARDING_STRATEGY"): "the old number becomes its name",
    ("file oldint", "FSDP_TRANSFORMER_CLS_TO_WRAP"): "a list becomes comma-separated names",
    ("file fp8ao", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"): "0 and False mean the same",
    ("file fp8ao", "ACCELERATE_FP8_PAD_INNER_DIM"): "0 and False mean the same",
}
LESS = {"MASTER_ADDR", "MASTER_PORT", "KMP_AFFINITY", "KMP_BLOCKTIME"}
"""Variables that differ where accel starts several processes: torch's agent sets the address and port of each rank, and
threads of several processes are not bound to the same cores."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in the folder that the original was recorded in, on a machine of two cores without GPUs."""
    (tmp_path / "configs").symlink_to(HERE / "configs")
    (tmp_path / "s.py").write_text("def main():\n    pass\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {}}')
    (tmp_path / "hosts").write_text("worker-0 slots=2\nworker-1 slots=2\n")
    (tmp_path / "hosts2").write_text("worker-0 slots=2\nworker-1 slots=2\n")
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "physical_cores", lambda: 2)
    monkeypatch.setattr(
        "accel_core.host.environ.snapshot", lambda: {"HF_HOME": str(tmp_path), "PATH": f"{tmp_path}/bin"}
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return tmp_path


def differences(
    case: str, ours: Mapping[str, str], theirs: Mapping[str, str], alone: bool
) -> dict[str, tuple[str | None, str | None]]:
    """Return the variables that differ without a listed reason.

    One process on a CPU computes with every core; the original leaves it at one unless --num_processes is said.
    """
    found = {}
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        excused = (
            mine == other
            or (other is None and (name in ALWAYS_MORE or name in MORE.get(case, {})))
            or (other is None and name.startswith("ACCELERATE_DYNAMO") and "ACCELERATE_USE_DEEPSPEED" in theirs)
            or (other is None and name == "OMP_NUM_THREADS" and "ACCELERATE_USE_DEEPSPEED" in theirs)
            or (mine is None and other == "None" and name in ALWAYS_MORE)
            or (case, name) in OTHER_VALUE
            or (mine is None and name in LESS and not alone)
            or (name == "OMP_NUM_THREADS" and mine == "2" and theirs.get("ACCELERATE_USE_CPU") == "True")
            or name == "PYTHONPATH"
        )
        if not excused:
            found[name] = (mine, other)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", WORDS)
@requires("engine:fsdp")
def test_processes_get_what_the_original_gives(settings, folder: Path, case: str) -> None:
    """Child environment, program and words are those of accelerate 1.15.0, but for the differences listed above."""
    theirs = PEER[case]
    missing = packages_missing(WORDS[case])
    if missing or case in REFUSED or ("error" in theirs and case not in NOT_REFUSED):
        error = MissingDependencyError if missing else ConfigurationError
        with pytest.raises(error, match="|".join(missing) or REFUSED.get(case)):
            refuse(settings(*WORDS[case]))
        return
    settings = settings(*WORDS[case])
    check_settings(settings)
    launcher = choose(settings)
    ours = dict(launcher.environ(settings))
    if "kind" not in theirs:
        assert case in NOT_REFUSED or launcher.name == "tpu"
        return
    alone = settings.layout.per_machine == 1
    assert differences(case, ours, theirs["environment"], alone) == {}
    command = ["PYTHON" if word == sys.executable else word for word in launcher.command(settings)]
    if case in OTHER_KIND:
        assert launcher.name == "torchrun"
    elif theirs["kind"] == "process":
        assert without_forwarded(command) == theirs["command"]
    else:
        assert launcher.name in ("torchrun", "deepspeed")
        compare_with_torchrun(case, command, settings, theirs["arguments"])


def packages_missing(words: list[str]) -> list[str]:
    """Return the packages that are not installed of the engines that flags or a file turn on."""
    files = [HERE / after for word, after in pairwise(words) if word == "--config_file"]
    kinds = {str(yaml.safe_load(file.read_text()).get("distributed_type")) for file in files}
    return [known.package for known in absent() if f"--use_{known.word}" in words or known.word.upper() in kinds]


def without_forwarded(command: list[str]) -> list[str]:
    """Leave out mpirun's `-x NAME=VALUE`, which hands variables to other hosts; the original forgets it."""
    kept = list(command)
    while "-x" in kept:
        place = kept.index("-x")
        del kept[place : place + 2]
    return kept


def refuse(settings: Settings) -> None:
    """Check settings and script."""
    check_settings(settings)
    check_script(settings)


def compare_with_torchrun(case: str, command: list[str], settings: Any, theirs: Mapping[str, Any]) -> None:
    """Compare what torchrun is told."""
    layout = settings.layout
    if theirs["nproc_per_node"] != "0":
        assert str(layout.per_machine) == theirs["nproc_per_node"]
    assert (layout.machines, layout.machine_rank) == (int(theirs["nnodes"].split(":")[0]), theirs["node_rank"])
    assert command[-1 - len(settings.arguments) :] == [settings.script, *settings.arguments]
    assert list(settings.arguments) == theirs["training_script_args"]
    for key in ("max_restarts", "monitor_interval", "role", "tee", "log_dir", "rdzv_conf"):
        assert settings[key] == theirs[key]
        assert (f"--{key.replace('_', '-')}={settings[key]}" in command) == settings.is_set(key)
    assert ("--module" in command, "--no-python" in command) == (bool(theirs["module"]), bool(theirs["no_python"]))
    if layout.machines > 1:
        if not case.startswith("file nodes"):
            assert settings["rdzv_backend"] == theirs["rdzv_backend"]
        endpoint = theirs["rdzv_endpoint"] or f"{theirs['master_addr']}:{theirs['master_port']}"
        assert f"--rdzv-endpoint={endpoint}" in command


def test_every_option_of_the_original_is_covered() -> None:
    """The words hold every long option of the launch parser that the original has."""
    said = {word for words in WORDS.values() for word in words if word.startswith("--")}
    known = {flag for action in launch_command_parser()._actions for flag in action.option_strings if "_" in flag}
    ours = {
        "--all_frames",
        "--nproc_per_node",
        "--processes_per_machine",
        "--log_dir",
        "--dry_run",
        "--rdzv_id",
        "--fsdp_ignored_modules",
        "--fp8_use_mxfp8_block_scaling",
        "--config_file",
        "--parallelism_config_ep_size",
        "--parallelism_config_pp_size",
        "--min_replicas",
    }
    assert known - said <= ours
