"""Whole weights from a folder that holds them in pieces, as Accelerate's function takes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from accel_core.errors import CheckpointNotFoundError, ConfigurationError
from accel_core.process import world
from accel_parallel.checkpoint.merge import merge_weights

__all__ = ["LARGEST_FILE", "merge_folder", "merge_fsdp_weights"]

LARGEST_FILE = "10GB"


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
    merge_folder(checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir, LARGEST_FILE)


def merge_folder(
    checkpoint_dir: str, output_path: str, safe_serialization: bool, remove_checkpoint_dir: bool, max_shard_size: str
) -> None:
    """Do what `merge_fsdp_weights` does, with files of at most `max_shard_size`."""
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
