"""`accel plan-training`: how much memory training takes on a layout of ranks."""

import argparse

from accel_plan.commands.plan import add_files, add_training

name = "plan-training"
help = "Predict the memory of a training step on each rank of a layout, without weights or devices."
run = "accel_plan.arguments:train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint",
        help="MODULE:NAME of a class or function, a folder with a transformers config, or a name that transformers "
        "knows",
    )
    add_files(parser)
    add_training(parser)
