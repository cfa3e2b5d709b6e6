"""`python -m accel_trackers show FOLDER`, for when accel-launch is not installed."""

import argparse
import sys

from accel_core.errors import AccelError
from accel_trackers import command
from accel_trackers.show import run


def main() -> int:
    """Read the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m accel_trackers", description=command.help)
    command.add_arguments(parser)
    try:
        return run(parser.parse_args())
    except AccelError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
