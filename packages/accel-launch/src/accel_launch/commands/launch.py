"""`accel launch`: its options. What it does is in `accel_launch.commands.start`."""

import argparse
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from accel_launch.arguments import Parser
from accel_launch.command import Command, resolve_runner
from accel_launch.settings.model import Setting
from accel_launch.settings.resolve import choose, remedy
from accel_launch.settings.table import ALL, BY_KEY

_EXAMPLES = """Examples:
  {0} train.py --lr 0.1                     one process, or one per GPU
  {0} --cpu -n 2 train.py                   two processes on the CPU
  {0} --use-fsdp --fsdp-version 2 train.py  the model sharded by FSDP2
  {0} --num-machines 2 --machine-rank 0 --main-process-ip 10.0.0.1 \\
      --main-process-port 29500 train.py             on each machine
"""
_MOST_USED = (
    "num_processes", "gpu_ids", "cpu", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "mixed_precision", "dynamo_backend", "use_fsdp", "fsdp_version", "use_deepspeed", "zero_stage", "config_file",
    "module", "tee", "log_dir", "watchdog", "max_restarts", "explain", "dry_run",
)  # fmt: skip
"""Options of `-h`."""


def _short_help(program: str) -> str:
    """Return what `-h` shows: examples, and the options that most runs need."""
    usage = f"Usage: {program} [options] SCRIPT [arguments of the script]"
    lines = [usage, "", COMMAND.help, "", _EXAMPLES.format(program), "Options:"]
    for setting in (BY_KEY[key] for key in _MOST_USED if key in BY_KEY):
        value = "" if setting.yes_or_no else setting.metavar if len(setting.metavar) < 12 else "NAME"
        flags = f"  {', '.join(setting.words)} {value}"
        lines += textwrap.wrap(setting.help, 80, initial_indent=f"{flags:<29} ", subsequent_indent=" " * 30)
    topics = "fsdp" if "use_fsdp" in BY_KEY else "compilation"
    lines += ["", f"`{program} --help` shows all options by topic, `--help {topics}` those of one."]
    return "\n".join(lines)


def _topics() -> dict[str, str]:
    """Return the words that name the topics of the options: the first of each title, and the engine's name."""
    words = {setting.topic.split()[0].lower().replace("-", "_"): setting.topic for setting in ALL}
    return words | {setting.engine: setting.topic for setting in ALL if setting.engine}


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
            words["metavar"] = setting.metavar
            if setting.choices:
                words["choices"] = setting.choices
        groups[setting.topic].add_argument(*setting.words, **words)


def _type(setting: Setting) -> Callable[[str], Any]:
    """Return a parser of a flag's value whose error says what is expected."""

    def parse(text: str) -> object:
        try:
            return choose(setting, text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}. {remedy(setting, text)}") from None

    return parse


def _help(setting: Setting) -> str:
    message = (
        "" if setting.default in (None, False, "") or setting.kind != "value" else f" (default: {setting.default})"
    )
    return (setting.help + message).replace("%", "%%")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, ALL)
    if isinstance(parser, Parser):
        parser.name_topics(_topics(), _short_help)
    parser.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)  # torchrun's: the default here
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
