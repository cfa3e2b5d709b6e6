"""The commands as functions, for programs that drive them: parsers, and what they do with parsed arguments.

Names and signatures are those that Accelerate has for the same things, so that a program written for it finds them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from accel_launch.cli import build_parser, find_command, main
from accel_launch.command import AnyCommand, resolve_runner
from accel_launch.commands.configure import default_config, update_config
from accel_launch.commands.environment_report import environment_report, show_env
from accel_launch.commands.start import launch, settings_from
from accel_launch.launchers.launcher import Launcher
from accel_launch.launchers.registry import choose
from accel_launch.launchers.sagemaker import SageMakerLauncher
from accel_launch.launchers.simple import SimpleLauncher
from accel_launch.launchers.torchrun import TorchrunLauncher
from accel_launch.launchers.tpu import TpuLauncher
from accel_launch.questions.ask import ask_all, asker_for
from accel_launch.questions.cluster import CLUSTER, ENVIRONMENT
from accel_launch.questions.dialogue import configuration_of, hold_dialogue
from accel_launch.questions.question import Question
from accel_launch.questions.sagemaker import SAGEMAKER
from accel_launch.settings.config import BaseConfig, ClusterConfig, SageMakerConfig, config_of
from accel_parallel.checkpoint import merge_command as merging
from accel_parallel.checkpoint.merge import merge_command

__all__ = [
    "config_command",
    "config_command_parser",
    "deepspeed_launcher",
    "default_command_parser",
    "default_config_command",
    "env_command",
    "env_command_parser",
    "get_cluster_input",
    "get_config_parser",
    "get_sagemaker_input",
    "get_user_input",
    "launch_command",
    "main",
    "merge_command",
    "merge_command_parser",
    "multi_gpu_launcher",
    "parser_of",
    "sagemaker_launcher",
    "simple_launcher",
    "test_command",
    "test_command_parser",
    "to_fsdp2_command_parser",
    "tpu_command_launcher",
    "tpu_command_parser",
    "tpu_launcher",
    "tpu_pod_launcher",
    "update_command_parser",
    "update_config_command",
]

_Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `add_subparsers` returns."""


def launch_command(args: argparse.Namespace) -> None:
    """Start the run that parsed arguments ask for.

    Of a namespace that `launch_command_parser` did not make, every value that differs from the default counts as said.

    Raises:
        SystemExit: The run failed; the code is the exit status.
    """
    status = launch(args)
    if status:
        raise SystemExit(status)  # Accelerate's function returns nothing


def _parser(word: str, subparsers: _Subparsers | None) -> argparse.ArgumentParser:
    return parser_of(find_command(word), subparsers)


def parser_of(command: AnyCommand, subparsers: _Subparsers | None) -> argparse.ArgumentParser:
    """Return the parser of a command, as one of `subparsers` where those are given."""
    if subparsers is None:
        return build_parser(command, "accelerate")  # in help and errors, the program that the user called
    parser: argparse.ArgumentParser = subparsers.add_parser(command.name, help=command.help)
    command.add_arguments(parser)
    parser.set_defaults(func=resolve_runner(command))  # programs call `args.func(args)`
    return parser


def config_command_parser(subparsers: _Subparsers | None = None) -> argparse.ArgumentParser:
    """Return the parser of `accel config`, as one of `subparsers` where those are given."""
    return _parser("config", subparsers)


def get_config_parser(subparsers: _Subparsers | None = None) -> argparse.ArgumentParser:
    """Return the parser of `accel config` with `default` and `update`."""
    return _parser("config", subparsers)


def env_command_parser(subparsers: _Subparsers | None = None) -> argparse.ArgumentParser:
    """Return the parser of `accel env`."""
    return _parser("env", subparsers)


def test_command_parser(subparsers: _Subparsers | None = None) -> argparse.ArgumentParser:  # noqa: PT028
    """Return the parser of `accel test`."""
    return _parser("test", subparsers)


def merge_command_parser(subparsers: _Subparsers | None = None) -> argparse.ArgumentParser:
    """Return the parser of `accel merge-weights`."""
    return parser_of(merging, subparsers)


def to_fsdp2_command_parser(subparsers: _Subparsers | None = None) -> argparse.ArgumentParser:
    """Return the parser of `accel to-fsdp2`."""
    return _parser("to-fsdp2", subparsers)


def tpu_command_parser(subparsers: _Subparsers | None = None) -> argparse.ArgumentParser:
    """Return the parser of `accel tpu-config`."""
    return _parser("tpu-config", subparsers)


def default_command_parser(parser: _Subparsers, parents: Sequence[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `default` to a set of sub-commands."""
    found: argparse.ArgumentParser = parser.add_parser("default", parents=parents)
    found.add_argument("--config_file", "--config-file", dest="save_location")
    found.add_argument("--mixed_precision", "--mixed-precision", choices=("no", "fp16", "bf16"), default="no")
    found.set_defaults(func=default_config_command)
    return found


def update_command_parser(parser: _Subparsers, parents: Sequence[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `update` to a set of sub-commands."""
    found: argparse.ArgumentParser = parser.add_parser("update", parents=parents)
    found.add_argument("--config_file", "--config-file")
    found.set_defaults(func=update_config_command)
    return found


def config_command(args: argparse.Namespace) -> None:
    """Ask and write the configuration file."""
    resolve_runner(find_command("config"))(args)


def default_config_command(args: argparse.Namespace) -> None:
    """Write the usual configuration of this machine."""
    default_config(args)


def update_config_command(args: argparse.Namespace) -> None:
    """Bring a configuration file to today's keys."""
    print(f"Updated {update_config(args)}.")  # noqa: T201  what the command prints


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print what a bug report needs, and return it."""
    show_env(args)
    return environment_report()


def test_command(args: argparse.Namespace) -> None:
    """Run the check of `accel test`."""
    status = resolve_runner(find_command("test"))(args)
    if status:
        raise SystemExit(status)


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run commands on every machine of a TPU pod."""
    resolve_runner(find_command("tpu-config"))(args)


def get_user_input() -> BaseConfig:
    """Ask everything and return the configuration as an object."""
    return config_of(hold_dialogue(asker_for(sys.stdin)))


def get_cluster_input() -> ClusterConfig:
    """Ask about one's own machines and return the configuration as an object."""
    return ClusterConfig.of(_dialogue_about(CLUSTER, "LOCAL_MACHINE"))


def get_sagemaker_input() -> SageMakerConfig:
    """Ask about a SageMaker job and return the configuration as an object."""
    return SageMakerConfig.of(_dialogue_about(SAGEMAKER, "AMAZON_SAGEMAKER"))


def _dialogue_about(questions: Sequence[Question], environment: str) -> dict[str, Any]:
    known = {"compute_environment": environment}
    asker = asker_for(sys.stdin)
    return configuration_of(ask_all((ENVIRONMENT, *questions), asker, known), (ENVIRONMENT, *questions))


def _run(launcher: Launcher, args: argparse.Namespace) -> None:
    status = launcher.run(settings_from(args))
    if status:
        raise SystemExit(status)


def simple_launcher(args: argparse.Namespace) -> None:
    """Start one process."""
    _run(SimpleLauncher(), args)


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Start several processes on torch's elastic agent."""
    _run(TorchrunLauncher(), args)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Start a DeepSpeed run: its own launcher over several machines, torch's agent elsewhere."""
    chosen = choose(settings_from(args))
    # On one machine its own launcher adds nothing.
    _run(chosen if chosen.name == "deepspeed" else TorchrunLauncher(), args)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Start the processes of a TPU machine."""
    _run(TpuLauncher(), args)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Start the script on every machine of a TPU pod."""
    _run(TpuLauncher(), args)


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> None:
    """Send a job to Amazon SageMaker."""
    SageMakerLauncher().run(replace(settings_from(args), config=sagemaker_config.to_dict()))
