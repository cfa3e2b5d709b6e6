"""Whole weights from a folder that holds them in pieces, as Accelerate's function takes it."""

from __future__ import annotations

from accel_parallel.checkpoint.merge import merge_folder
from accel_parallel.checkpoint.merge_command import LARGEST_FILE


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
