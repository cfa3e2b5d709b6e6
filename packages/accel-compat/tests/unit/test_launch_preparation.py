"""Command lines and environments for programs that start processes themselves."""

import argparse
import sys
from pathlib import Path

import pytest

from accel_core.host.environ import patch_environment
from accelerate import _launch_preparation as preparation
from accelerate.commands import launch
from accelerate.utils import launch as utils_launch


def _arguments(*words: str) -> argparse.Namespace:
    parsed: argparse.Namespace = launch.launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])
    return parsed


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path, monkeypatch):
    """Look for the configuration file in an empty folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_one_process_and_several() -> None:
    """The command of one runs the script with this Python; the environment is this process's with the settings."""
    with patch_environment(SURELY_UNSET="inherited"):
        command, environment = preparation.prepare_simple_launcher_cmd_env(
            _arguments("--cpu", "--num_processes", "1", "--mixed_precision", "bf16")
        )
    assert command == [sys.executable, "train.py", "--lr", "1"]
    assert environment["SURELY_UNSET"] == "inherited"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_USE_CPU"].lower() in ("true", "1")
    words = ("--cpu", "--num_processes", "2", "--mixed_precision", "bf16")
    assert preparation.prepare_multi_gpu_env(_arguments(*words))["ACCELERATE_MIXED_PRECISION"] == "bf16"


MACHINES = ("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1")
SEVERAL = ("--cpu", "--num_processes", "4", *MACHINES)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--cpu", "--num_processes", "2"), {"nproc_per_node": 2, "master_port": "29500"}),
        (
            (*SEVERAL, "--main_process_port", "29511"),
            {"nproc_per_node": 2, "nnodes": "2", "node_rank": 1, "rdzv_endpoint": "10.0.0.1:29511"},
        ),
        (
            (*SEVERAL, "--same_network"),
            {"nproc_per_node": 2, "nnodes": "2", "node_rank": 1, "master_addr": "10.0.0.1", "master_port": "29500"},
        ),
    ],
)
def test_arguments_get_torchruns_names(words: tuple[str, ...], expected: dict[str, object]) -> None:
    """A program that hands the arguments on to torchrun finds what torchrun asks for, and only that."""
    arguments = _arguments(*words)
    before = dict(vars(arguments))
    preparation.prepare_multi_gpu_env(arguments)
    changed = {name: value for name, value in vars(arguments).items() if before.get(name) != value}
    assert changed.pop("main_process_port", None) in (None, 29500)
    assert changed == expected


def test_port_zero_is_a_free_one() -> None:
    """Zero asks for a port that nobody uses."""
    arguments = _arguments("--cpu", "--num_processes", "2", "--main_process_port", "0")
    preparation.prepare_multi_gpu_env(arguments)
    assert int(arguments.master_port) == arguments.main_process_port > 0


def test_open_settings_are_filled_in(tmp_path: Path) -> None:
    """What the command line leaves open comes from the file, if there is one, else from defaults, and is launched."""
    file = tmp_path / "config.yaml"
    file.write_text("mixed_precision: bf16\nuse_cpu: true\n")
    arguments, config, from_file = launch._validate_launch_command(_arguments("--config_file", str(file)))
    assert (arguments.mixed_precision, arguments.num_machines, arguments.num_processes) == ("bf16", 1, 1)
    assert (arguments.dynamo_backend, arguments.use_cpu, from_file) == ("no", True, True)
    assert config.mixed_precision == "bf16"
    environment = launch.prepare_simple_launcher_cmd_env(arguments)[1]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    arguments, config, from_file = launch._validate_launch_command(_arguments("--cpu", "--num_processes", "2"))
    assert (arguments.mixed_precision, arguments.num_processes, config, from_file) == ("no", 2, None, False)


def test_contradictions_are_refused() -> None:
    """Settings that cannot be had together are a ValueError, as on the command line."""
    with pytest.raises(ValueError, match=r"--cpu.*--multi-gpu"):
        launch._validate_launch_command(_arguments("--cpu", "--multi_gpu"))


def test_words_become_hyperparameters() -> None:
    """Pairs of name and value become a dict with numbers and truth values; a flag alone is a ValueError."""
    words = ["--lr", "1e-3", "--epochs", "3", "--name", "abc", "--flag", "True"]
    assert utils_launch._convert_nargs_to_dict(words) == {"lr": 1e-3, "epochs": 3, "name": "abc", "flag": True}
    with pytest.raises(ValueError, match=r"--flag"):
        utils_launch._convert_nargs_to_dict(["--lr", "1", "--flag"])


def test_mesh_axes_are_added_alone() -> None:
    """Only variables of the mesh are added to an environment, which is the one that comes back."""
    given = {"KEPT": "1"}
    arguments = _arguments(
        "--cpu", "--num_processes", "2", "--use_parallelism_config", "--parallelism_config_dp_replicate_size", "2"
    )
    assert preparation.prepare_extend_env_parallelism_config(arguments, given) is given
    assert given.pop("KEPT") == "1"
    assert given["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert all(name.startswith("PARALLELISM_CONFIG_") for name in given)


def test_a_path_is_added_at_the_end() -> None:
    """Empty entries are left out; an unset variable counts as empty."""
    with patch_environment(SURELY_PATHS="/a::/b"):
        assert preparation.env_var_path_add("SURELY_PATHS", "/c") == "/a:/b:/c"
    assert preparation.env_var_path_add("SURELY_UNSET", "/c") == "/c"
