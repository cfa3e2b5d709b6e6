"""The command `accel trackers show`: curves in the terminal.

Offered to the command line under the entry-point group `accel.commands`; imports no torch before it runs.
"""

from __future__ import annotations

import argparse

name = "trackers"
help = "Draw the curves of runs in the terminal."
run = "accel_trackers.show:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{show}")
    show = verbs.add_parser("show", help="Draw the curves of the last runs below a folder.")
    show.add_argument("folder", help="A logging directory, or a file of one run.")
    show.add_argument("--name", action="append", help="Only these values; may be given several times.")
    show.add_argument("--last", type=int, default=3, help="How many runs to draw, the last ones (default: 3).")
    show.add_argument("--width", type=int, default=72, help="Columns of a plot (default: 72).")
    show.add_argument("--height", type=int, default=12, help="Rows of a plot (default: 12).")
