"""`accel plan-training`: how much memory training takes on a layout of ranks."""

import argparse
import json

from accel_core.mesh.spec import LAYOUT_HELP
from accel_core.options.enums import AUTOCAST_PRECISIONS

name = "plan-training"
help = "Predict the memory of a training step on each rank of a layout, without weights or devices."
run = "accel_plan.arguments:train"


def shape(text: str) -> tuple[int, ...]:
    """Read the shape of a sample: 3x224x224."""
    return tuple(map(int, text.lower().split("x")))


def styles(text: str) -> dict[str, str]:
    """Read a plan of tensor parallel: JSON that maps names to styles."""
    try:
        found: object = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("not a mapping")
    return found


def add_files(parser: argparse.ArgumentParser) -> None:
    """Declare what both commands have: the dtype of weights, and the files to write."""
    parser.add_argument("--dtype", help="dtype that the weights are loaded in")
    parser.add_argument("--svg", metavar="FILE", help="draw the plan")
    parser.add_argument(
        "--json", metavar="FILE", help="write the plan as data, for Plan.from_json if it places weights"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint",
        help="MODULE:NAME of a class or function, a folder with a transformers config, or a name that transformers "
        "knows",
    )
    add_files(parser)
    parser.add_argument(
        "--layout",
        metavar="LAYOUT,...",
        help=f"layouts to compare: {LAYOUT_HELP} (default: single, or with --fits those that are tried)",
    )
    parser.add_argument("--fits", metavar="SIZE", help="find the smallest layout that fits into SIZE per rank")
    parser.add_argument(
        "--ranks", metavar="N", type=int, default=8, help="the most ranks that --fits tries (default: 8)"
    )
    parser.add_argument(
        "--batch", metavar="N", type=int, default=1, help="samples per pass, over all ranks (default: 1)"
    )
    parser.add_argument(
        "--accumulation", metavar="N", type=int, default=1, help="passes per optimizer step (default: 1)"
    )
    samples = parser.add_mutually_exclusive_group(required=True)
    samples.add_argument("--sequence", metavar="N", type=int, help="tokens per sample, for language models")
    samples.add_argument("--sample", metavar="NxNxN", type=shape, help="shape of a sample, for other models: 3x224x224")
    parser.add_argument(
        "--optimizer", default="adamw", help="of torch.optim, with arguments: sgd:momentum=0.9 (default: adamw)"
    )
    parser.add_argument(
        "--mixed-precision", choices=AUTOCAST_PRECISIONS, default="no", help="as in training (default: no)"
    )
    parser.add_argument(
        "--checkpointing",
        choices=("yes", "no"),
        help="whether blocks recompute activations in the backward pass (default: show both)",
    )
    parser.add_argument(
        "--loss",
        metavar="MODULE:NAME",
        help="function of output and batch (default: the model's own loss, or the mean of its output)",
    )
    parser.add_argument(
        "--chunk-logits",
        action="store_true",
        help="for a language model of transformers whose loss `accelerator.chunk_logits` computes",
    )
    parser.add_argument(
        "--tp-plan", metavar="JSON", type=styles, help='styles by names for tp: {"layers.*.up": "colwise"}'
    )
    parser.add_argument(
        "--reduce-bucket",
        metavar="N",
        type=int,
        default=500_000_000,
        help="elements of DeepSpeed's reduce_bucket_size, for zero layouts (default: its own, 500000000)",
    )
    parser.add_argument(
        "--schedule", metavar="NAME,...", default="1f1b", help="schedules of pp layouts to compare (default: 1f1b)"
    )
    parser.add_argument(
        "--microbatches",
        metavar="N",
        type=int,
        help="into how many a batch is divided, for pp layouts (default: two for each rank along pp)",
    )
    parser.add_argument(
        "--split",
        metavar="NAME,...",
        help="blocks with which stages begin, but the first (default: stages of about equal bytes)",
    )
