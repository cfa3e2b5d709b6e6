"""The script that a command runs, and the script's arguments."""

import argparse
from collections.abc import Callable
from pathlib import Path

from accel_core.errors import ConfigurationError
from accel_launch.imports import load
from accel_launch.terminal import say


def check_script(target: str) -> None:
    """Refuse a script that does not exist; `script.py:function` names a function of one."""
    script, colon, _ = target.partition(".py:")
    script += ".py" if colon else ""
    if not Path(script).is_file():
        raise ConfigurationError(
            f"The script does not exist; got {script!r}. Pass the path of a script, or script.py:function."
        )


def runner_of(module: str) -> Callable[[argparse.Namespace], int]:
    """Return a function that checks the script, then imports a module with torch and calls its `run`."""

    def run(args: argparse.Namespace) -> int:
        check_script(args.script)
        for word in args.script_arguments:
            if word.partition("=")[0] in args.own_options:
                say(f"{word} comes after the script, so it goes to the script. Write it before if it is for accel.")
        return int(load(module).run(args))

    return run


def add_script(parser: argparse.ArgumentParser, help: str = "The script, which uses an Accelerator.") -> None:
    """Declare the script that a command runs, after the command's own options, and the script's arguments."""
    parser.set_defaults(own_options=list(parser._option_string_actions))
    parser.add_argument("script", help=help)
    parser.add_argument(
        "script_arguments",
        nargs=argparse.REMAINDER,
        help="Arguments of the script. Options of this command are written before the script.",
    )
