"""`accel merge-weights`: whole weights from a folder that holds them in pieces. Declaring it imports no torch."""

import argparse

LARGEST_FILE = "10GB"
"""Size of the largest file of merged weights, where nobody asks for another."""

name = "merge-weights"
help = "Merge a sharded checkpoint into ordinary weight files."
run = "accel_parallel.checkpoint.merge:merge_command"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint_directory", help="Folder that holds the weights, such as pytorch_model_fsdp_0 or pytorch_model."
    )
    parser.add_argument("output_path", help="Folder for the merged weights.")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Write torch's format, not safetensors.")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the folder of weights afterwards.")
    parser.add_argument(
        "--max_shard_size",
        default=LARGEST_FILE,
        metavar="SIZE",
        help="Largest file, as in 5GB (default: %(default)s).",
    )
