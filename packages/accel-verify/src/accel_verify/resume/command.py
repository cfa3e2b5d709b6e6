"""The command `accel check-resume`, torch-free until it runs."""

import argparse

from accel_verify.script_arguments import ScriptArguments

__all__ = ["add_arguments", "help", "name", "run"]

name = "check-resume"
help = "Run a script straight and interrupted, and show what differs first."
run = "accel_verify.resume.check:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    _add_options(parser)
    parser.add_argument("script", help="The script, which uses an Accelerator.")
    parser.add_argument(
        "script_arguments",
        nargs=argparse.REMAINDER,
        action=ScriptArguments,
        needed=("--steps", "--at"),
        options=_add_options,
        help="Arguments of the script. Options may follow them, from --steps or --at on.",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="Optimizer steps to run.")
    parser.add_argument("--at", type=int, help="Optimizer step after which the second run is interrupted.")
    parser.add_argument("--num-processes", type=int, default=1, help="Processes of each run.")
    parser.add_argument("--cpu", action="store_true", help="Run on the CPU whatever hardware is here.")
    parser.add_argument("--timeout", type=float, default=3600.0, help="Seconds after which a run is ended.")
