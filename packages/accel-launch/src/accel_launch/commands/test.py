"""`accel test`: check for real that processes start, gather, split data, and train like one process."""

import argparse

from accel_core.host.program.run_module import own_command
from accel_launch.command import Command, resolve_runner
from accel_launch.commands.launch import COMMAND as LAUNCH
from accel_launch.commands.launch import launch_command_parser
from accel_launch.settings.location import default_file


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", help="Configuration to check instead of the default one.")
    parser.add_argument(
        "--num_processes",
        type=int,
        help="Processes to check with, without a configuration: 2 on the CPU.",
    )


def words_for(config_file: str | None, processes: int | None) -> list[str]:
    """Return the words of `accel launch` that run the check."""
    words = [] if config_file is None else ["--config-file", config_file]
    if processes is not None:
        words += ["--num-processes", str(processes)]
    if config_file is None and default_file() is None:
        words += ["--cpu"] + ([] if processes is not None else ["--num-processes", "2"])
    return [*words, *own_command("accel_launch.selfcheck")[1:]]


def check(args: argparse.Namespace) -> int:
    """Launch the check."""
    launch = resolve_runner(LAUNCH)
    status = launch(launch_command_parser().parse_args(words_for(args.config_file, args.num_processes))) or 0
    print("The check passed: this configuration is ready for training." if status == 0 else "The check failed.")
    return status


COMMAND = Command(
    "test", "Check that processes start, gather, split data, and train as one process does.", _add_arguments, check
)
