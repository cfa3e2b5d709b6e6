"""`accelerate merge-weights`: whole weights from a folder that holds them in pieces."""

from __future__ import annotations

import argparse
from typing import Any

from accel_launch.command import Command
from accelerate._command_functions import parser_of
from accelerate._weights_merging import LARGEST_FILE, merge_folder

__all__ = ["MERGE_WEIGHTS", "merge_command", "merge_command_parser"]


def merge_command(args: argparse.Namespace) -> None:
    """Merge weights, as the command line asks."""
    largest = getattr(args, "max_shard_size", LARGEST_FILE)
    merge_folder(
        args.checkpoint_directory,
        args.output_path,
        not args.unsafe_serialization,
        args.remove_checkpoint_dir,
        largest,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint_directory", help="Folder that holds the weights, such as pytorch_model_fsdp_0 or pytorch_model."
    )
    parser.add_argument("output_path", help="Folder for the merged weights.")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Write torch's format, not safetensors.")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the folder of weights afterwards.")
    parser.add_argument(
        "--max_shard_size", default=LARGEST_FILE, help="Largest file, such as 5GB (default: %(default)s)."
    )


MERGE_WEIGHTS = Command("merge-weights", "Merge the pieces of a checkpoint's weights.", _add_arguments, merge_command)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`, as one of `subparsers` where those are given."""
    return parser_of(MERGE_WEIGHTS, subparsers)
