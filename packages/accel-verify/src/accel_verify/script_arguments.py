"""Arguments of a script, and options of the command that follow them."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.imports import load

__all__ = ["ScriptArguments", "add_script", "check_script", "runner_of"]


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
        return int(load(module).run(args))

    return run


def add_script(
    parser: argparse.ArgumentParser,
    options: Callable[[argparse.ArgumentParser], None],
    *,
    needed: Sequence[str],
    script: str,
) -> None:
    """Declare a command's options, the script that it runs, and the script's arguments."""
    options(parser)
    parser.add_argument("script", help=script)
    parser.add_argument(
        "script_arguments",
        nargs=argparse.REMAINDER,
        action=ScriptArguments,
        needed=needed,
        options=options,
        help=f"Arguments of the script. Options may follow them, from {' or '.join(needed)} on.",
    )


class ScriptArguments(argparse.Action):
    """Takes all words after a script.

    They are the script's own. Only where none of the options that the command is known by was written before the
    script, the words from the first of those on are options of the command: `SCRIPT a b --layouts dp2 --json`.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        needed: Sequence[str],
        options: Callable[[argparse.ArgumentParser], None],
        **settings: Any,
    ) -> None:
        super().__init__(option_strings, dest, **settings | {"required": False})
        self._needed, self._options = needed, options

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the script's arguments, and the options after them."""
        words = list(values or ())
        missing = self._missing(namespace)
        split = [word for word in words if word in missing and missing != list(self._needed)]
        if split:
            parser.error(f"{split[0]} comes after the script. Write it before the script, with the other options.")
        if missing == list(self._needed):
            ends = (at for at, word in enumerate(words) if word.partition("=")[0] in self._needed)
            end = next(ends, len(words))
            behind = type(parser)(prog=parser.prog, add_help=False)
            self._options(behind)
            behind.parse_args(words[end:], namespace)
            words = words[:end]
        setattr(namespace, self.dest, words)

    def _missing(self, namespace: argparse.Namespace) -> list[str]:
        return [each for each in self._needed if getattr(namespace, each[2:].replace("-", "_")) is None]
