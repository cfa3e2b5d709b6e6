"""The options of `accel estimate-memory`, declared without torch for the command and for the module that runs it."""

import argparse

DTYPES = ("float32", "float16", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model_name", help="local checkpoint or config, or a name that transformers or timm knows")
    parser.add_argument("--library_name", "--library-name", choices=["timm", "transformers"])
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=list(DTYPES),
        help="dtypes to count in: names of torch's floating point and integer dtypes",
    )
    parser.add_argument(
        "--trust_remote_code", "--trust-remote-code", action="store_true", help="run the model's own code"
    )
