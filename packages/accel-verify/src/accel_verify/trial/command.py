"""`accel try`: its options. What it does is in `accel_verify.trial.run`."""

import argparse

from accel_core.options.enums import AUTOCAST_PRECISIONS
from accel_launch.command import Command
from accel_verify.script_arguments import add_script, runner_of


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME,...", help="GPUs to predict the memory on: A100-80GB, L4, 24GB.")
    parser.add_argument("--layout", help="Layout of ranks to compare with one process (default: dp2).")
    parser.add_argument("--cpu", action="store_true", help="Run on the CPU whatever hardware is here.")
    parser.add_argument("--mixed-precision", choices=AUTOCAST_PRECISIONS, help="Number format of all runs.")
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds after which a run is ended.")
    add_script(parser)


COMMAND = Command(
    "try",
    "Run a few steps of a script on one process and on two, and compare results, speed and memory.",
    _add_arguments,
    runner_of("accel_verify.trial.run"),
    "What the script saves by its Accelerator is not written; other files are, so give it a folder for them. The exit "
    "status is 0 where both train alike, 1 where they do not or one fails, and 2 for a wrong argument.",
)
