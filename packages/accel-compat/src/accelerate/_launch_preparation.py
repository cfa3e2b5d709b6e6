"""Command lines and environments of the processes of a run, as functions for programs that start them themselves.

Names and signatures are those that Accelerate has for the same things, so that a program written for it finds them.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_core.host import environ
from accel_core.host.ports import get_free_port
from accel_launch.commands.start import settings_from
from accel_launch.launchers.registry import choose
from accel_launch.launchers.sagemaker import SageMakerLauncher, hyperparameters, inputs_of, job_description
from accel_launch.launchers.simple import SimpleLauncher
from accel_launch.launchers.torchrun import TorchrunLauncher
from accel_launch.launchers.tpu import TpuLauncher
from accel_launch.settings.checks import check_settings
from accel_launch.settings.child import child_environment, engine_environment
from accel_launch.settings.config import BaseConfig, SageMakerConfig, load_config_from_file
from accelerate._machine import USUAL_PORT


def prepare_sagemager_args_inputs(
    sagemaker_config: SageMakerConfig, args: argparse.Namespace
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the arguments of SageMaker's estimator, and its data channels."""
    settings = replace(settings_from(args), config=sagemaker_config.to_dict())
    job = job_description(settings, SageMakerLauncher().environ(settings))
    return argparse.Namespace(**job), inputs_of(settings.config) or {}


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return command line and whole environment of a run of one process, or of an MPI run."""
    settings = settings_from(args)
    chosen = choose(settings)
    # Who calls this starts the process without an agent.
    launcher = SimpleLauncher() if chosen.name == "torchrun" else chosen
    return launcher.command(settings), {**settings.inherited, **launcher.environ(settings)}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the whole environment of a run of several processes, and give its arguments torchrun's names too."""
    settings = settings_from(args)
    layout = settings.layout
    address, port = settings["main_process_ip"], settings["main_process_port"]
    args.main_process_port = port = port or (USUAL_PORT if port is None else get_free_port())  # 0 asks for a free one
    args.nproc_per_node = layout.per_machine
    if layout.machines > 1:
        args.nnodes, args.node_rank = layout.nnodes, layout.machine_rank
    if layout.machines > 1 and not settings["same_network"]:
        args.rdzv_endpoint = f"{address}:{port}"
    else:
        args.master_port = str(port)
        if layout.machines > 1:
            args.master_addr = str(address)
    return {**settings.inherited, **child_environment(settings)}


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, BaseConfig | None, bool]:
    """Fill in every setting that a command line leaves open, and check them all.

    What the configuration file says comes back too, and whether the precision comes from it.

    Raises:
        ConfigurationError: The command line, the environment or the configuration file is not valid.
    """
    settings = settings_from(args)
    check_settings(settings)
    layout = settings.layout
    for key in settings:
        setattr(args, key, settings[key])
    args.num_processes, args.num_machines = layout.processes, layout.machines
    args.mixed_precision = str(args.mixed_precision or "no").lower()
    args.dynamo_backend = args.dynamo_backend or "no"
    args.use_cpu = bool(args.cpu)  # the key that files have
    config = None if settings.file is None else load_config_from_file(settings.file)
    return args, config, settings.resolved["mixed_precision"].origin == "file"


def _convert_nargs_to_dict(nargs: list[str]) -> dict[str, Any]:
    """Return the words of a script, `--name value` pairs, as SageMaker's hyperparameters: values by name."""
    return hyperparameters(nargs)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return command line and whole environment of a DeepSpeed run."""
    settings = settings_from(args)
    chosen = choose(settings)
    launcher = chosen if chosen.name == "deepspeed" else TorchrunLauncher()
    return launcher.command(settings), {**settings.inherited, **launcher.environ(settings)}


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the sizes of mesh axes to an environment, and return it."""
    return _extend(args, current_env, "PARALLELISM_CONFIG_")


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the FP8 settings to an environment, and return it."""
    return _extend(args, current_env, "ACCELERATE_FP8_")


def _extend(args: argparse.Namespace, current_env: dict[str, str], prefix: str) -> dict[str, str]:
    found: Mapping[str, str] = engine_environment(settings_from(args))
    # The rest is for others to add.
    current_env.update({name: value for name, value in found.items() if name.startswith(prefix)})
    return current_env


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add torch-xla's variables to an environment, or for the machines of a pod to `args.env`; return both."""
    found = {
        name: value for name, value in TpuLauncher().environ(settings_from(args)).items() if name.startswith("XLA_")
    }
    if pod:
        # The script of each machine gets them from there.
        args.env = [*(args.env or []), *(f"{name}={value}" for name, value in found.items())]
    else:
        current_env.update(found)
    return args, current_env


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return a variable that holds paths with one more at its end."""
    paths = [path for path in (environ.text(env_var_name) or "").split(":") if path]
    return ":".join([*paths, str(Path(path_to_add))])
