"""The package's commands without accel-launch: `python -m accel_bigmodel estimate-memory …`."""

import argparse
import sys
from collections.abc import Sequence

from accel_bigmodel.commands import estimate
from accel_core.errors import AccelError, ConfigurationError
from accel_core.options.engines import load

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m accel_bigmodel", description="Load and run large models.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    estimate.add_arguments(subparsers.add_parser(estimate.name, help=estimate.help))
    args = parser.parse_args(arguments)
    try:
        return load(estimate.run)(args) or 0
    except AccelError as failure:
        sys.stderr.write(f"{failure}\n")
        return 2 if isinstance(failure, ConfigurationError) else 1


if __name__ == "__main__":
    sys.exit(main())
