"""`accel verify-parallel`: its options. What it does is in `accel_verify.parallel.run`."""

import argparse

from accel_core.mesh.spec import LAYOUT_HELP
from accel_core.options.enums import PRECISIONS
from accel_launch.command import Command
from accel_verify.script_arguments import add_script, runner_of


def _above_zero(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}. Give it a whole number above 0.")
    return number


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layouts",
        default="dp2",
        help=f"Comma-separated layouts of at least two ranks to compare with one process: {LAYOUT_HELP} "
        "(default: dp2).",
    )
    parser.add_argument("--steps", type=_above_zero, default=3, help="Optimizer steps to compare (default: 3).")
    parser.add_argument("--cpu", action="store_true", help="Run on the CPU whatever hardware is here.")
    parser.add_argument("--mixed-precision", choices=tuple(PRECISIONS), help="Number format of all runs.")
    parser.add_argument("--dynamo-backend", help="Compile the model in all runs with this backend.")
    parser.add_argument(
        "--count-as-ranks",
        action="store_true",
        help="Report the layout's num_processes on one process (for scripts that scale the learning rate).",
    )
    parser.add_argument(
        "--timeout", type=_above_zero, default=600, help="Seconds after which a run is ended (default: 600)."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    add_script(parser, "The script, which uses an Accelerator; `script.py:function` for a function.")


COMMAND = Command(
    "verify-parallel",
    "Check that a script trains on layouts of ranks as on one process.",
    _add_arguments,
    runner_of("accel_verify.parallel.run"),
    "The exit status is 0 where every layout equals one process, 1 where one differs, is not comparable, is "
    "refused or fails, and 2 for a wrong argument.",
)
