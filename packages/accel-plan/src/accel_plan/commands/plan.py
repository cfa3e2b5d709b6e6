"""`accel plan`: where the parts of a checkpoint would go, or how much memory training takes."""

import argparse

from accel_core.mesh.spec import LAYOUT_HELP
from accel_core.options.enums import AUTOCAST_PRECISIONS

name = "plan"
help = "Plan which device holds which part of a checkpoint; `accel plan-training` plans the memory of training."
run = "accel_plan.arguments:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint",
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
    add_files(parser)
    training = parser.add_argument_group()  # `accel plan --train` does what `accel plan-training` does
    training.add_argument("--train", action="store_true")
    add_training(training)
    for action in training._group_actions:
        action.help = argparse.SUPPRESS


def add_files(parser: argparse.ArgumentParser) -> None:
    """Declare what both commands have: the dtype of weights, and the files to write."""
    parser.add_argument("--dtype", help="dtype that the weights are loaded in")
    parser.add_argument("--svg", metavar="FILE", help="draw the plan")
    parser.add_argument(
        "--json", metavar="FILE", help="write the plan as data, for Plan.from_json if it places weights"
    )


def add_training(group: argparse._ActionsContainer) -> None:
    """Declare the options of the memory of training."""
    group.add_argument(
        "--layout",
        metavar="LAYOUT,...",
        help=f"layouts to compare: {LAYOUT_HELP} (default: single, or with --fits those that are tried)",
    )
    group.add_argument("--fits", metavar="SIZE", help="find the smallest layout that fits into SIZE per rank")
    group.add_argument("--ranks", metavar="N", help="the most ranks that --fits tries (default: 8)")
    group.add_argument("--batch", metavar="N", help="samples per pass, over all ranks (default: 1)")
    group.add_argument("--accumulation", metavar="N", help="passes per optimizer step (default: 1)")
    group.add_argument("--sequence", metavar="N", help="tokens per sample, for language models")
    group.add_argument("--sample", metavar="NxNxN", help="shape of a sample, for other models: 3x224x224")
    group.add_argument("--optimizer", help="of torch.optim, with arguments: sgd:momentum=0.9 (default: adamw)")
    group.add_argument("--mixed-precision", choices=AUTOCAST_PRECISIONS, help="as in training (default: no)")
    group.add_argument(
        "--checkpointing",
        choices=("yes", "no"),
        help="whether blocks recompute activations in the backward pass (default: show both)",
    )
    group.add_argument(
        "--loss",
        metavar="MODULE:NAME",
        help="function of output and batch (default: the model's own loss, or the mean of its output)",
    )
    group.add_argument(
        "--chunk-logits",
        action="store_true",
        help="for a language model of transformers whose loss `accelerator.chunk_logits` computes",
    )
    group.add_argument("--tp-plan", metavar="JSON", help='styles by names for tp: {"layers.*.up": "colwise"}')
    group.add_argument(
        "--reduce-bucket",
        metavar="N",
        help="elements of DeepSpeed's reduce_bucket_size, for zero layouts (default: its own, 500000000)",
    )
    group.add_argument("--schedule", metavar="NAME,...", help="schedules of pp layouts to compare (default: 1f1b)")
    group.add_argument(
        "--microbatches",
        metavar="N",
        help="into how many a batch is divided, for pp layouts (default: two for each rank along pp)",
    )
    group.add_argument(
        "--split",
        metavar="NAME,...",
        help="blocks with which stages begin, but the first (default: stages of about equal bytes)",
    )
