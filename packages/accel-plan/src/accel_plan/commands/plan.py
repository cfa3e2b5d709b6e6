"""`accel plan`: where the parts of a checkpoint would go, or how much memory training takes."""

import argparse

from accel_plan.commands import plan_training

name = "plan"
help = "Plan which device holds which part of a checkpoint; `accel plan-training` plans the memory of training."
run = "accel_plan.arguments:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint",
        nargs="?",
        help="safetensors file, index, folder, or folder with a transformers config",
    )
    parser.add_argument(
        "--max-memory",
        metavar="DEVICE=SIZE,...",
        help="bytes per device: 0=24GiB,cpu=64GiB (default: free)",
    )
    parser.add_argument(
        "--headroom",
        metavar="SIZE",
        help="kept free per accelerator: 2GiB, 0.1 of it, or 4x2048 for what 4 sequences of 2048 tokens take",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="class or function that makes the model: planned in its own order, as it is loaded",
    )
    parser.add_argument(
        "--expert-cache",
        metavar="SIZE",
        help="experts wait on the disk, SIZE of them on the device: 8GiB; says what a token costs",
    )
    parser.add_argument("--balanced", action="store_true", help="share evenly between accelerators")
    parser.add_argument("--whole", action="append", metavar="CLASS", help="class that is not split")
    plan_training.add_files(parser)
    # `accel plan --train …` does what `accel plan-training …` does.
    parser.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    training = type(parser)(prog="accel plan-training", allow_abbrev=False)
    plan_training.add_arguments(training)
    parser.set_defaults(training=training)
