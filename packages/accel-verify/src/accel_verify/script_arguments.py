"""Arguments of a script, and options of the command that were written behind them."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["ScriptArguments", "add_script"]


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
    """Takes all words behind a script.

    They are the script's own. Only where none of the options that the command needs was written before the script,
    the words from the first of those on are options of the command: `SCRIPT a b --layouts dp2 --json`.
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
        super().__init__(option_strings, dest, **settings)
        self._needed, self._options = needed, options

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the script's arguments, and the options behind them."""
        words = list(values or ())
        if self._missing(namespace) == list(self._needed):
            ends = (at for at, word in enumerate(words) if word.partition("=")[0] in self._needed)
            end = next(ends, len(words))
            behind = type(parser)(prog=parser.prog, add_help=False)
            self._options(behind)
            behind.parse_args(words[end:], namespace)
            words = words[:end]
        missing = self._missing(namespace)
        if missing:
            parser.error(f"the following arguments are required: {', '.join(missing)}")
        setattr(namespace, self.dest, words)

    def _missing(self, namespace: argparse.Namespace) -> list[str]:
        return [each for each in self._needed if getattr(namespace, each[2:].replace("-", "_")) is None]
