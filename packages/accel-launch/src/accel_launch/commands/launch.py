"""`accel launch`: its options. What it does is in `accel_launch.commands.start`."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from accel_launch.arguments import Parser
from accel_launch.command import Command, resolve_runner
from accel_launch.settings.model import Setting
from accel_launch.settings.resolve import wanted
from accel_launch.settings.table import ALL

__all__ = ["COMMAND", "add_settings", "launch_command_parser"]


def add_settings(parser: argparse.ArgumentParser, table: Iterable[Setting]) -> None:
    """Declare settings as options, grouped by topic."""
    groups: dict[str, Any] = {}
    for setting in table:
        if setting.topic not in groups:
            groups[setting.topic] = parser.add_argument_group(setting.topic)
        words: dict[str, Any] = {"dest": setting.key, "default": setting.default, "help": _help(setting)}
        if setting.kind == "switch":
            words["action"] = "store_true"
        elif setting.kind == "off-switch":
            words.update(action="store_const", const=False)
        else:
            words.update(action="append" if setting.kind == "append" else "store", type=_type(setting))
            if setting.choices:
                words["choices"] = setting.choices
        groups[setting.topic].add_argument(*setting.words, **words)


def _type(setting: Setting) -> Callable[[str], Any]:
    """Return what reads a flag's word, with a message that says what is wanted."""

    def parse(text: str) -> object:
        try:
            return setting.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}. Give it {wanted(setting)}.") from None

    return parse


def _help(setting: Setting) -> str:
    message = (
        "" if setting.default in (None, False, "") or setting.kind != "value" else f" (default: {setting.default})"
    )
    return (setting.help + message).replace("%", "%%")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, ALL)
    parser.add_argument("training_script", nargs="?", help="Python file to start; a module with -m.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Arguments for the script.")


COMMAND = Command(
    "launch",
    "Start a script on one or many processes.",
    _add_arguments,
    "accel_launch.commands.start:launch",
    "Settings come from flags, then the environment, then the configuration file, then defaults; --explain shows "
    "where each value comes from.",
)


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel launch`."""
    words = {"description": COMMAND.help, "epilog": COMMAND.epilog, "allow_abbrev": False}
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = Parser(prog="accel launch", **words)
    else:
        parser = subparsers.add_parser("launch", **words)
        parser.set_defaults(func=resolve_runner(COMMAND))
    _add_arguments(parser)
    return parser
