"""Command lines and environments for programs that start processes themselves."""

import argparse
import sys

import pytest

from accel_core.host.environ import patch_environment
from accelerate import _launch_preparation as preparation
from accelerate.commands.launch import launch_command_parser


def _arguments(*words: str) -> argparse.Namespace:
    parsed: argparse.Namespace = launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])
    return parsed


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path, monkeypatch):
    """Look for the configuration file in an empty folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_one_process() -> None:
    """The command runs the script with this Python, in this process's environment and the settings."""
    with patch_environment(SURELY_UNSET="inherited"):
        command, environment = preparation.prepare_simple_launcher_cmd_env(
            _arguments("--cpu", "--num_processes", "1", "--mixed_precision", "bf16")
        )
    assert command == [sys.executable, "train.py", "--lr", "1"]
    assert environment["SURELY_UNSET"] == "inherited"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_USE_CPU"].lower() in ("true", "1")


def test_several_processes() -> None:
    """The environment of several processes says the settings too."""
    environment = preparation.prepare_multi_gpu_env(
        _arguments("--cpu", "--num_processes", "2", "--mixed_precision", "bf16")
    )
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


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
