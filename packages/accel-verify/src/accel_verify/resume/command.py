"""`accel check-resume`: its options. What it does is in `accel_verify.resume.check`."""

import argparse

from accel_launch.command import Command
from accel_verify.script_arguments import add_script, runner_of


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="Optimizer steps to run (default: twice --at, or 6).")
    parser.add_argument(
        "--at", type=int, help="Optimizer step after which the second run is interrupted (default: the middle)."
    )
    parser.add_argument("--num-processes", type=int, default=1, help="Processes of each run.")
    parser.add_argument("--cpu", action="store_true", help="Run on the CPU whatever hardware is here.")
    parser.add_argument(
        "--store", metavar="ADDRESS", help="Save the interrupted run below an address, as s3://bucket/tests."
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="Seconds after which a run is ended.")
    add_script(parser)


COMMAND = Command(
    "check-resume",
    "Run a script straight and interrupted, and show what differs first.",
    _add_arguments,
    runner_of("accel_verify.resume.check"),
    "The exit status is 0 where both runs are identical, 1 where they differ or the script fails, and 2 for a wrong "
    "argument.",
)
