"""The package's commands without accel-launch: `python -m accel_plan plan …`."""

import sys
from collections.abc import Sequence

from accel_bigmodel.__main__ import run_one_of
from accel_plan.commands import plan, plan_training


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    return run_one_of([plan, plan_training], "accel_plan", "Plan before you load or train.", arguments)


if __name__ == "__main__":
    sys.exit(main())
