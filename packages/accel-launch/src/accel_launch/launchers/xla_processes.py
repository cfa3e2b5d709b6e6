"""The program that a TPU machine runs: imports the script and starts its main training function on every core.

It runs in the started process, never in the launcher, so it may import what the script imports.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError


def find_function(script: str, name: str, *, module: bool = False) -> Callable[..., Any]:
    """Import a script and return its main training function."""
    if not module:
        sys.path.insert(0, str(Path(script).resolve().parent))
    found = importlib.import_module(script if module else Path(script).stem)
    function: Callable[..., Any] | None = getattr(found, name, None)
    if not callable(function):
        raise ConfigurationError(
            f"A TPU run starts a function of the script; {script} has no function `{name}`. Name it with "
            "--main-training-function."
        )
    return function


def main() -> None:
    """Start the function on every core of this machine."""
    parser = argparse.ArgumentParser(prog="accel_launch.launchers.xla_processes")
    parser.add_argument("--function", default="main")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.argv = [args.script, *args.arguments]
    function = find_function(args.script, args.function, module=args.module)
    import torch_xla

    torch_xla.launch(_run, args=(function,))


def _run(index: int, function: Callable[..., Any]) -> None:
    function()


if __name__ == "__main__":
    main()
