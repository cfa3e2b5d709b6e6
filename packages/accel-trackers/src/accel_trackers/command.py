"""The command `accel trackers`: show curves in the terminal, and send what a tracker did not receive.

Offered to the command line under the entry-point group `accel.commands`; imports no torch before it runs.
"""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "help", "name", "run"]

name = "trackers"
help = "Draw the curves of runs in the terminal, or send to trackers what they did not take."
run = "accel_trackers.command_line:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{show,replay}")
    show = verbs.add_parser("show", help="Draw the curves of the last runs below a folder.")
    show.add_argument("folder", help="A logging directory, or a spool file.")
    show.add_argument("--name", action="append", help="Only these values; may be given several times.")
    show.add_argument("--last", type=int, default=3, help="How many runs to draw, the last ones (default: 3).")
    show.add_argument("--width", type=int, default=72, help="Columns of a plot (default: 72).")
    show.add_argument("--height", type=int, default=12, help="Rows of a plot (default: 12).")
    replay = verbs.add_parser("replay", help="Send a tracker the entries of spool files that it does not have.")
    replay.add_argument("path", help="A spool file, or a folder that is searched for them.")
    replay.add_argument("--tracker", action="append", help="Only these trackers; may be given several times.")
    replay.add_argument("--to", help="Send this tracker what another one failed to store.")
    replay.add_argument("--logging-dir", help="Folder for trackers that write to one (default: the run's).")
    replay.add_argument("--init", default="{}", help="Arguments of the tracker's constructor, as JSON.")
    replay.add_argument("--keep", action="store_true", help="Keep spool files that have been sent completely.")
