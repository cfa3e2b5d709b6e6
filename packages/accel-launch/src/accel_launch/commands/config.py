"""`accel config`: its options. What it does is in `accel_launch.commands.configure`."""

import argparse
from typing import Any

from accel_core.options.enums import AUTOCAST_PRECISIONS
from accel_launch.arguments import Parser
from accel_launch.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file(parser, None)
    parser.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="Set this value instead of asking; may be repeated. `fsdp_config.fsdp_version=2` sets a key in a group.",
    )
    parser.add_argument("--yes", action="store_true", help="Write without asking, even over an existing file.")
    commands: Any = parser.add_subparsers(
        dest="subcommand", metavar="default|update|show|get|path", parser_class=Parser
    )
    default = commands.add_parser("default", help="Write a file with the usual settings of this machine.")
    default.add_argument("--config_file", dest="save_location", help="File to write instead of the default one.")
    default.add_argument("--yes", action="store_true", default=argparse.SUPPRESS, help="Replace an existing file.")
    default.add_argument("--mixed_precision", choices=AUTOCAST_PRECISIONS, default="no", help="Precision.")
    update = commands.add_parser("update", help="Update an existing file to the current keys and defaults.")
    shown = {
        "show": commands.add_parser("show", help="Print the file that a launch reads."),
        "get": commands.add_parser("get", help="Print one value of it."),
        "path": commands.add_parser("path", help="Print where it is."),
    }
    shown["get"].add_argument("key", help="Key, as in num_processes or mixed_precision.")
    for each in (update, *shown.values()):
        _add_file(each, argparse.SUPPRESS)


def _add_file(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Declare the file; SUPPRESS keeps a value that was given before the sub-command."""
    parser.add_argument("--config_file", default=default, help="File to write instead of the default one.")


COMMAND = Command(
    "config",
    "Ask about your machines and write the configuration file.",
    _add_arguments,
    "accel_launch.commands.configure:configure",
    "Without a terminal, answers are read from standard input, one line for each question. A file that is replaced is "
    "kept under its name with .bak.",
)
