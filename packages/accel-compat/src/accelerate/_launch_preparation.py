"""Command lines and environments of the processes of a run, as functions for programs that start them themselves.

Names and signatures are those that Accelerate has for the same things, so that a program written for it finds them.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_launch.commands.start import settings_from
from accel_launch.launchers.deepspeed import DeepSpeedLauncher
from accel_launch.launchers.launcher import Launcher
from accel_launch.launchers.registry import choose
from accel_launch.launchers.sagemaker import SageMakerLauncher, inputs_of, job_description
from accel_launch.launchers.simple import SimpleLauncher
from accel_launch.launchers.torchrun import TorchrunLauncher
from accel_launch.launchers.tpu import TpuLauncher
from accel_launch.settings import environ
from accel_launch.settings.child import child_environment, engine_environment
from accel_launch.settings.config import SageMakerConfig

__all__ = [
    "env_var_path_add",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
]


def prepare_sagemager_args_inputs(
    sagemaker_config: SageMakerConfig, args: argparse.Namespace
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the arguments of SageMaker's estimator, and its data channels.

    Args:
        sagemaker_config: The configuration of the job.
        args: Parsed command line of `accel launch`.
    """
    settings = replace(settings_from(args), config=sagemaker_config.to_dict())
    job = job_description(settings, SageMakerLauncher().environ(settings))
    return argparse.Namespace(**job), inputs_of(settings.config) or {}


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return command line and whole environment of a run of one process, or of an MPI run."""
    settings = settings_from(args)
    chosen = choose(settings)
    launcher = SimpleLauncher() if chosen.name == "torchrun" else chosen
    return launcher.command(settings), {**settings.inherited, **launcher.environ(settings)}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the whole environment of a run of several processes."""
    settings = settings_from(args)
    return {**settings.inherited, **child_environment(settings)}


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return command line and whole environment of a DeepSpeed run."""
    settings = settings_from(args)
    launcher: Launcher = DeepSpeedLauncher() if DeepSpeedLauncher().claims(settings) else TorchrunLauncher()
    return launcher.command(settings), {**settings.inherited, **launcher.environ(settings)}


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the sizes of mesh axes to an environment, and return it."""
    return _extend(args, current_env, "PARALLELISM_CONFIG_")


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the FP8 settings to an environment, and return it."""
    return _extend(args, current_env, "ACCELERATE_FP8_")


def _extend(args: argparse.Namespace, current_env: dict[str, str], prefix: str) -> dict[str, str]:
    found: Mapping[str, str] = engine_environment(settings_from(args))
    current_env.update({name: value for name, value in found.items() if name.startswith(prefix)})
    return current_env


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add torch-xla's variables to an environment.

    Args:
        args: Parsed command line of `accel launch`.
        current_env: The environment; it is changed.
        pod: Whether they go to the machines of a pod, through `args.env`, instead.

    Returns:
        The arguments and the environment.
    """
    found = {
        name: value for name, value in TpuLauncher().environ(settings_from(args)).items() if name.startswith("XLA_")
    }
    if pod:
        args.env = [*(args.env or []), *(f"{name}={value}" for name, value in found.items())]
    else:
        current_env.update(found)
    return args, current_env


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return a variable that holds paths with one more at its end.

    Args:
        env_var_name: Name of the variable.
        path_to_add: The path.
    """
    paths = [path for path in (environ.text(env_var_name) or "").split(":") if path]
    return ":".join([*paths, str(Path(path_to_add))])
