"""The argument parser of every command: both spellings of an option, help grouped by topic, colors on a terminal."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from accel_core.options.engines import PUBLIC, require, require_switched
from accel_launch.settings.given import GIVEN
from accel_launch.settings.metavars import metavar_of
from accel_launch.terminal import colors_wanted, paint

_FLAG = re.compile(r"(?<![\w-])(--?[a-zA-Z][\w-]*)")
_HEADING = re.compile(r"^([A-Z][^\n]*:)$", re.MULTILINE)


class HelpFormatter(argparse.HelpFormatter):
    """Help with one spelling for each option and without a wall of usage."""

    def __init__(self, *words: Any, **sizes: int) -> None:
        super().__init__(*words, **{"max_help_position": 34, **sizes})  # type: ignore[arg-type]  # the program comes first

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        words = [flag for flag in action.option_strings if "_" not in flag] or list(action.option_strings)
        shown = ", ".join(sorted(words, key=len))
        if action.nargs == 0:
            return shown
        return f"{shown} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return metavar_of(action.dest, action.type)

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None,
    ) -> str:
        if usage is not None:
            return super()._format_usage(usage, actions, groups, prefix)
        words = ["[options]"] if any(action.option_strings for action in actions) else []
        words.extend(
            self._format_args(action, self._get_default_metavar_for_positional(action))
            for action in actions
            if not action.option_strings
        )
        # argparse builds the name of a sub-command's parser from this text, and passes no heading then
        heading = "Usage: " if prefix is None else prefix
        return f"{heading}{self._prog} {' '.join(words)}\n\n"


class _Help(argparse._HelpAction):
    """`-h` shows the short help where a command has one, `--help` all of it, and `--help TOPIC` one group."""

    def __call__(self, parser: Any, namespace: object, values: object, option_string: str | None = None) -> None:
        if isinstance(values, str) and not values.endswith(".py"):
            print(parser.format_topic(values))
        elif option_string == "-h" and parser.short_help is not None:
            print(parser.painted(parser.short_help(parser.prog)))
        else:
            parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Argument parser that takes `--long-option` and `--long_option`, and remembers what was written.

    The namespace that `parse_args` returns tells `given` which destinations appeared on the command line, so that a
    default that was written differs from one that was not. It is made with the arguments of `argparse.ArgumentParser`.

    Attributes:
        short_help: Makes the text of `-h` of the program's name, for a command whose options fill more than a screen.
        topics: Words that name a group of options after `--help`, each with the group's title.
    """

    __signature__: ClassVar[inspect.Signature] = inspect.signature(argparse.ArgumentParser)

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        helps = settings.pop("add_help", True)
        super().__init__(prog, **{"formatter_class": HelpFormatter, **settings, "add_help": False})
        self.short_help: Callable[[str], str] | None = None
        self.topics: dict[str, str] = {}
        if helps:
            self._help = self.add_argument("-h", "--help", action=_Help, help="Show this help and exit.")

    def add_argument(self, *flags: str, **settings: Any) -> argparse.Action:
        """Declare an argument under both spellings of its long flags."""
        return super().add_argument(*_both_spellings(flags), **settings)

    def add_argument_group(self, *words: str | None, **settings: Any) -> "Group":
        """Open a group of options that the help shows together."""
        group = Group(self, *words, **settings)
        self._action_groups.append(group)
        return group

    def name_topics(self, topics: dict[str, str], short_help: Callable[[str], str]) -> None:
        """Give `-h` its own text, and let `--help WORD` show the group whose title the word stands for."""
        self.topics, self.short_help = topics, short_help
        self._help.nargs, self._help.metavar = "?", "TOPIC"
        shown = ", ".join(self._words())
        self._help.help = f"Show all options, or those of a topic: {shown}; -h shows the most used."

    def _words(self) -> list[str]:
        """Return a word for each topic: the first one."""
        return list({title: word for word, title in reversed(self.topics.items())}.values())[::-1]

    def format_topic(self, word: str) -> str:
        """Return the options of one group."""
        title = self.topics.get(word.lower().replace("-", "_").removeprefix("__").removeprefix("use_"))
        if title is None:
            self.error(f"there are no options about {word!r}; topics are {', '.join(self._words())}.")
        formatter = self._get_formatter()
        for group in self._action_groups:
            if group.title == title:
                formatter.start_section(title)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        return self.painted(formatter.format_help().rstrip("\n"))

    def format_help(self) -> str:
        """Return the help, colored where standard output is a terminal."""
        lines = Path(__file__).with_name("examples.txt").read_text(encoding="utf-8").splitlines()
        examples = [f"  {line}\n" for line in lines if f"{line} ".startswith(f"{self.prog} ")]
        return self.painted(super().format_help() + ("\nExamples:\n" if examples else "") + "".join(examples))

    @staticmethod
    def painted(text: str) -> str:
        """Return a help in colors where standard output is a terminal."""
        if not colors_wanted(sys.stdout):
            return text
        text = _FLAG.sub(lambda match: paint(match[1], "flag", True), text)
        return _HEADING.sub(lambda match: paint(match[1], "heading", True), text)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: object = None) -> tuple[Any, list[str]]:
        """Parse a command line; of a command with topics, note which options it says."""
        words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(words, namespace)
        if not self.topics:  # actions of other commands may rely on defaults, and on being called once
            return found, unknown
        defaults = [(action, action.default) for action in self._actions if action.option_strings]
        for action, _ in defaults:
            action.default = argparse.SUPPRESS
        said, _ = super().parse_known_args(words)
        for action, default in defaults:
            action.default = default
        setattr(found, GIVEN, set(vars(said)))
        return found, unknown

    def parse_args(self, args: Iterable[str] | None = None, namespace: object = None) -> Any:
        """Parse a command line; for an unknown option, suggest the one that was probably meant."""
        found, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return found
        require_switched(vars(found))  # the option may belong to a package that is not installed
        flags = [word for word in unknown if word.startswith("-")]
        option = flags[0].partition("=")[0].strip("-").replace("-", "_") if flags else ""
        for known in PUBLIC:
            if option.startswith(f"{known.word}_") or (option and re.fullmatch(known.options, option)):
                require(known.word, f"the option {flags[0].partition('=')[0]}")
        message = f"unknown option {flags[0]}." if flags else f"got {unknown[0]!r}, which nothing takes."
        near = get_close_matches(flags[0].partition("=")[0].replace("_", "-"), self.flags(), n=1) if flags else []
        self.error(message + (f" Did you mean {near[0]}?" if near else ""))

    def subcommands(self) -> "dict[str, Parser]":
        """Return the parsers of the sub-commands by name; empty where there are none."""
        found: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found.update(action.choices)
        return found

    def flags(self) -> list[str]:
        """Return the long options of this parser and its sub-commands, in the spelling with dashes."""
        parsers = [self, *self.subcommands().values()]
        words = (flag for parser in parsers for action in parser._actions for flag in action.option_strings)
        return sorted({flag for flag in words if flag.startswith("--") and "_" not in flag})

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with status 2."""
        stream = sys.stderr
        label = paint("error:", "error", colors_wanted(stream))
        self.exit(2, f"{self.prog}: {label} {message}\nRun `{self.prog} --help` for the options.\n")


class Group(argparse._ArgumentGroup):
    """Options that help shows under one heading."""

    def add_argument(self, *flags: str, **settings: Any) -> argparse.Action:
        """Declare an argument under both spellings of its long flags."""
        return super().add_argument(*_both_spellings(flags), **settings)


def _both_spellings(flags: tuple[str, ...]) -> list[str]:
    words: list[str] = []
    for flag in flags:
        for word in (flag, flag[:2] + flag[2:].replace("-", "_"), flag[:2] + flag[2:].replace("_", "-")):
            if word not in words and (word == flag or flag.startswith("--")):
                words.append(word)
    return words
