"""The package's commands without accel-launch: `python -m accel_plan plan …`."""

import argparse
import sys
from collections.abc import Sequence

from accel_core.errors import AccelError, ConfigurationError
from accel_core.options.engines import load
from accel_plan.commands import plan, plan_training

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m accel_plan", description="Plan before you load or train.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    commands = (plan, plan_training)
    for command in commands:
        command.add_arguments(subparsers.add_parser(command.name, help=command.help))
    args = parser.parse_args(arguments)
    place = next(command.run for command in commands if command.name == args.command)
    try:
        return load(place)(args) or 0
    except AccelError as failure:
        sys.stderr.write(f"{failure}\n")
        return 2 if isinstance(failure, ConfigurationError) else 1


if __name__ == "__main__":
    sys.exit(main())
