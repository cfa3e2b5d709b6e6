"""`accel doctor`: its options. What it does is in `accel_verify.diagnosis.examine`."""

import argparse

from accel_launch.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", help="Configuration file to examine instead of the default one.")
    parser.add_argument("--checkpoint_dir", default=".", help="Folder for checkpoints (default: the working folder).")
    parser.add_argument("--no_collective", action="store_true", help="Do not start two ranks.")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="Seconds that imports, and two ranks, may take (default: 120)."
    )
    parser.add_argument("--slurm", action="store_true", help="Examine SLURM too, on a login node or in a job.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


COMMAND = Command(
    "doctor",
    "Check this machine for problems that make runs fail, and name remedies.",
    _add_arguments,
    "accel_verify.diagnosis.examine:diagnose",
    "Each finding is ok, a warning or a problem; the exit status is 1 where there is a problem. Libraries are imported "
    "and ranks started in processes of their own.",
)
