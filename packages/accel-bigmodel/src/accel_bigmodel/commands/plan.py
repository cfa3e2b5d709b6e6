"""`accel plan`: where the parts of a checkpoint would go."""

import argparse

name = "plan"
help = "Plan which device holds which part of a checkpoint, reading its headers only."
run = "accel_bigmodel.plan_for:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: An empty parser.
    """
    parser.add_argument("checkpoint", help="safetensors file, index, folder, or folder with a transformers config")
    parser.add_argument(
        "--max-memory",
        default=None,
        metavar="DEVICE=SIZE,...",
        help="bytes per device: 0=24GiB,cpu=64GiB (default: free)",
    )
    parser.add_argument(
        "--headroom",
        default=None,
        metavar="SIZE",
        help="kept free per accelerator: 2GiB, 0.1 of it, or 4x2048 for what 4 sequences of 2048 tokens take",
    )
    parser.add_argument(
        "--model",
        default=None,
        metavar="MODULE:NAME",
        help="class or function that makes the model: planned in its own order, as it is loaded",
    )
    parser.add_argument("--dtype", default=None, help="dtype that the weights are loaded in")
    parser.add_argument("--balanced", action="store_true", help="share evenly between accelerators")
    parser.add_argument("--whole", action="append", default=None, metavar="CLASS", help="class that is not split")
    parser.add_argument("--svg", default=None, metavar="FILE", help="draw the plan")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the plan, to be read by Plan.from_json")
