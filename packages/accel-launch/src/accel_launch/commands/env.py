"""`accel env`: its options. What it shows is in `accel_launch.commands.environment_report`."""

import argparse

from accel_launch.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", help="Configuration file to show instead of the default one.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


COMMAND = Command(
    "env",
    "Show versions, devices and configuration, for a bug report.",
    _add_arguments,
    "accel_launch.commands.environment_report:show_env",
)
