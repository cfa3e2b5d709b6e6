"""`accelerate merge-weights`: one file of weights from a folder that holds several."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from accel_bigmodel.checkpoint.read import open_checkpoint
from accel_core.checkpoint.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel_core.checkpoint.plain import save
from accel_core.errors import CheckpointNotFoundError, ConfigurationError, EngineUnavailableError
from accel_launch.cli import build_parser
from accel_launch.command import Command

__all__ = ["MERGE_WEIGHTS", "merge_command", "merge_command_parser", "merge_fsdp_weights"]


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Write the weights of a folder as one file.

    Args:
        checkpoint_dir: Folder with a file of weights, or with an index and its shards.
        output_path: Folder for the file: `model.safetensors`, or `pytorch_model.bin`.
        safe_serialization: Write safetensors rather than torch's format.
        remove_checkpoint_dir: Remove the folder afterwards.

    Raises:
        CheckpointError: There are no weights in the folder, or they are damaged.
        ConfigurationError: The folder shall be removed, and the file would lie in it.
        EngineUnavailableError: The weights are in the format of torch's distributed checkpoints.
    """
    source, target = Path(checkpoint_dir), Path(output_path)
    if not source.is_dir():
        raise CheckpointNotFoundError(f"There is no folder of weights to merge; got {checkpoint_dir}. Check the path.")
    distributed = next(source.rglob(".metadata"), None)
    if distributed is not None:
        raise EngineUnavailableError(
            f"merge-weights does not read torch's distributed checkpoints yet; got {distributed.parent}. Merge it with "
            "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch`."
        )
    if remove_checkpoint_dir and target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"The folder to remove would hold the merged file; got {output_path} in {checkpoint_dir}. Name another "
            "folder for the file, or keep the checkpoint."
        )
    checkpoint = open_checkpoint(source)
    state = {name: checkpoint.shard_of(name).tensor(name) for name in checkpoint}
    target.mkdir(parents=True, exist_ok=True)
    save(state, target / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME), False, safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(source)


def merge_command(args: argparse.Namespace) -> None:
    """Merge weights into one file, as the command line asks."""
    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_directory", help="Folder that holds the weights.")
    parser.add_argument("output_path", help="Folder for the merged file.")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Write torch's format, not safetensors.")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the folder of weights afterwards.")


MERGE_WEIGHTS = Command(
    "merge-weights", "Merge the weights of a checkpoint into one file.", _add_arguments, merge_command
)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`, as one of `subparsers` where those are given."""
    if subparsers is None:
        return build_parser(MERGE_WEIGHTS, "accelerate")
    parser: argparse.ArgumentParser = subparsers.add_parser(MERGE_WEIGHTS.name, help=MERGE_WEIGHTS.help)
    _add_arguments(parser)
    parser.set_defaults(func=merge_command)
    return parser
