"""`accelerate merge-weights`: whole weights from a folder that holds them in pieces."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from accel_core.checkpoint.merge import merge_weights
from accel_core.errors import CheckpointNotFoundError, ConfigurationError
from accel_core.process import world
from accel_launch.command import Command
from accelerate._command_functions import parser_of

__all__ = ["MERGE_WEIGHTS", "merge_command", "merge_command_parser", "merge_fsdp_weights"]

_LARGEST = "10GB"


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Write the weights of a folder as whole ones: one file, or several of 10 GB with an index.

    In a run of several processes the main one writes.

    Args:
        checkpoint_dir: Folder of shards that torch's distributed checkpoints made, such as `pytorch_model_fsdp_0`; or
            a folder with a file of weights, or with an index and its files.
        output_path: Folder for `model.safetensors`, or `pytorch_model.bin`.
        safe_serialization: Write safetensors rather than torch's format.
        remove_checkpoint_dir: Remove the folder once the weights are written.

    Raises:
        CheckpointError: There are no weights in the folder, they are damaged, or they are of several saves.
        ConfigurationError: The folder shall be removed, and the weights would lie in it.
    """
    _merge(checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir, _LARGEST)


def _merge(
    checkpoint_dir: str, output_path: str, safe_serialization: bool, remove_checkpoint_dir: bool, max_shard_size: str
) -> None:
    source, target = Path(checkpoint_dir), Path(output_path)
    if not source.is_dir():
        raise CheckpointNotFoundError(f"There is no folder of weights to merge; got {checkpoint_dir}. Check the path.")
    if remove_checkpoint_dir and target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"The folder to remove would hold the merged weights; got {output_path} in {checkpoint_dir}. Name another "
            "folder for them, or keep the checkpoint."
        )
    if not world.ensure().is_main:
        return
    merge_weights(source, target, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(source)


def merge_command(args: argparse.Namespace) -> None:
    """Merge weights, as the command line asks."""
    largest = getattr(args, "max_shard_size", _LARGEST)
    _merge(
        args.checkpoint_directory,
        args.output_path,
        not args.unsafe_serialization,
        args.remove_checkpoint_dir,
        largest,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_directory", help="Folder that holds the weights, such as pytorch_model_fsdp_0.")
    parser.add_argument("output_path", help="Folder for the merged weights.")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Write torch's format, not safetensors.")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the folder of weights afterwards.")
    parser.add_argument("--max_shard_size", default=_LARGEST, help="Largest file, such as 5GB (default: %(default)s).")


MERGE_WEIGHTS = Command("merge-weights", "Merge the pieces of a checkpoint's weights.", _add_arguments, merge_command)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`, as one of `subparsers` where those are given."""
    return parser_of(MERGE_WEIGHTS, subparsers)
