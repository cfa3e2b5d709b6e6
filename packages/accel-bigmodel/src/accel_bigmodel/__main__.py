"""The package's commands without accel-launch: `python -m accel_bigmodel estimate-memory …`."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from accel_bigmodel.commands import estimate
from accel_core.errors import AccelError, ConfigurationError
from accel_core.options.engines import load


def run_one_of(
    commands: Sequence[ModuleType], package: str, description: str, arguments: Sequence[str] | None = None
) -> int:
    """Run the command of a package that a command line names."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=description)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in commands:
        command.add_arguments(subparsers.add_parser(command.name, help=command.help))
    args = parser.parse_args(arguments)
    place = next(command.run for command in commands if command.name == args.command)
    try:
        return load(place)(args) or 0
    except AccelError as failure:
        sys.stderr.write(f"{failure}\n")
        return 2 if isinstance(failure, ConfigurationError) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    return run_one_of([estimate], "accel_bigmodel", "Load and run large models.", arguments)


if __name__ == "__main__":
    sys.exit(main())
