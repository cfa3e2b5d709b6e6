"""The program `accel`: finds the command, reads its options, runs it, and turns errors into messages.

Built-in commands are a static table, so that `accel --help` starts nothing; entry points are looked for only when the
word is not one of them.
"""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from accel_core.errors import AccelError, ConfigurationError
from accel_core.host.installed import points_of
from accel_core.options.engines import load
from accel_launch._version import __version__
from accel_launch.arguments import Parser
from accel_launch.command import AnyCommand, Command, resolve_runner
from accel_launch.terminal import colors_wanted, paint

_ENTRY_POINT_GROUP = "accel.commands"
"""Entry-point group under which other distributions offer commands."""


class _Entry(NamedTuple):
    topic: str
    help: str
    place: str | None = None
    package: str = "accel-launch"


BUILT_IN: dict[str, _Entry] = {
    "launch": _Entry("Run", "Start a script on one or many processes.", "accel_launch.commands.launch"),
    "try": _Entry(
        "Run",
        "Run a few steps on one process and on two, and compare results, speed and memory.",
        package="accel-verify",
    ),
    "test": _Entry(
        "Run",
        "Check that processes start, gather, split data, and train as one process does.",
        "accel_launch.commands.test",
    ),
    "verify-parallel": _Entry(
        "Run", "Check that a script trains on layouts of ranks as on one process.", package="accel-verify"
    ),
    "check-resume": _Entry(
        "Run", "Check that a run that is interrupted and resumed equals one that is not.", package="accel-verify"
    ),
    "config": _Entry(
        "Configure", "Ask about your machines and write the configuration file.", "accel_launch.commands.config"
    ),
    "tpu-config": _Entry(
        "Configure", "Run commands on every machine of a TPU pod before training.", "accel_launch.commands.tpu"
    ),
    "completion": _Entry("Configure", "Print the completion script for your shell."),
    "merge-weights": _Entry(
        "Convert", "Merge a sharded checkpoint into ordinary weight files.", package="accel-parallel"
    ),
    "to-fsdp2": _Entry("Convert", "Turn a configuration for FSDP1 into one for FSDP2.", package="accel-parallel"),
    "estimate-memory": _Entry("Inspect", "Estimate how much memory a model needs.", package="accel-bigmodel"),
    "plan": _Entry("Inspect", "Plan where a model's weights go.", package="accel-plan"),
    "plan-training": _Entry("Inspect", "Predict the memory of training on a layout.", package="accel-plan"),
    "trackers": _Entry("Inspect", "Draw the curves of runs.", package="accel-trackers"),
    "doctor": _Entry(
        "Inspect", "Check this machine for problems that make runs fail, and name remedies.", package="accel-verify"
    ),
    "env": _Entry(
        "Inspect", "Show versions, devices and configuration, for a bug report.", "accel_launch.commands.env"
    ),
}
"""Commands of the help: topic, one sentence, the module that holds `COMMAND`, and the package that offers it."""


def find_command(word: str, program: str = "accel") -> AnyCommand:
    """Return a command by the word typed after `accel`."""
    name = word.replace("_", "-")
    if name == "completion":
        return _completion()
    entry = BUILT_IN.get(name)
    if entry is not None and entry.place is not None:
        command: AnyCommand = import_module(entry.place).COMMAND
        return command
    offered = points_of(_ENTRY_POINT_GROUP)
    if name in offered:
        contributed: AnyCommand = load(offered[name])
        return contributed
    if entry is not None:
        raise ConfigurationError(
            f"The command `{name}` comes with {entry.package}, which is not installed. Run: pip install {entry.package}"
        )
    known = sorted({*BUILT_IN, *offered})
    near = get_close_matches(name, known, n=1)
    hint = f"Did you mean `{program} {near[0]}`? " if near else ""
    raise ConfigurationError(f"Unknown command `{word}`. {hint}Known are {', '.join(known)}.")


def _completion() -> AnyCommand:
    """Return the completion command, which is built here because it lists all others."""
    completion = import_module("accel_launch.commands.completion")

    def run(args: argparse.Namespace) -> int:
        if args.words is None:
            print(completion.script_for(args.shell), end="")
        else:
            names = {*BUILT_IN, *points_of(_ENTRY_POINT_GROUP)}
            print("\n".join(completion.complete(args.words, names, lambda word: build_parser(find_command(word)))))
        return 0

    return Command(
        "completion",
        BUILT_IN["completion"].help,
        completion.add_arguments,
        run,
        "Put `source <(accel completion bash)` into ~/.bashrc.",
    )


def build_parser(command: AnyCommand, program: str = "accel") -> Parser:
    """Return the argument parser of a command."""
    parser = Parser(
        prog=f"{program} {command.name}",
        description=command.help,
        epilog=getattr(command, "epilog", None),
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return parser


def _overview(program: str) -> str:
    colors = colors_wanted(sys.stdout)
    lines = [f"{paint('Usage:', 'heading', colors)} {program} COMMAND [options]", ""]
    for topic in dict.fromkeys(entry.topic for entry in BUILT_IN.values()):
        lines.append(paint(f"{topic}:", "heading", colors))
        for name, entry in BUILT_IN.items():
            if entry.topic == topic:
                owner = "" if entry.package == "accel-launch" else f" ({entry.package})"
                lines.append(f"  {paint(name.ljust(18), 'flag', colors)}{entry.help}{owner}")
        lines.append("")
    others = [name for name in points_of(_ENTRY_POINT_GROUP) if name not in BUILT_IN]
    if others:
        lines.append(paint("Of other packages:", "heading", colors))
        lines += [f"  {paint(name, 'flag', colors)}" for name in others]
        lines.append("")
    lines.append(f"`{program} help COMMAND` shows a command's options; other packages can add commands of their own.")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None, *, program: str = "accel") -> int:
    """Run the program."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help" if words[2:] else "-h", *words[2:]]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(program))
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"accel-launch {__version__}")
        return 0
    try:
        command = find_command(words[0], program)
        args = build_parser(command, program).parse_args(words[1:])
        return resolve_runner(command)(args) or 0
    except AccelError as error:
        label = paint("error:", "error", colors_wanted(sys.stderr))
        print(f"{program} {words[0]}: {label} {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
