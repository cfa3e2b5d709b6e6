"""One line per option.

A table is a dataclass whose every field is made by `option`. From that one line come the default, the way the
environment variable is read and written, the command-line flag and its help, the question that is asked about it and
its row in the reference:

    @dataclass(frozen=True)
    class CompilationOptions:
        option_prefix = "dynamo_"
        environment_prefix = "ACCELERATE_"

        mode: str = option("default", "Optimization mode of torch.compile.")

This one is the field `mode` of the plugin, `dynamo_mode` for the launcher, and ACCELERATE_DYNAMO_MODE in the
environment. A plugin whose fields have the names and the order of a table's inherits them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from accel_core._records import record
from accel_core.errors import ConfigurationError, expect_one_of
from accel_core.host import environ

_UNSET: object = object()
"""Default of the launcher that a row leaves to its table."""


@record(frozen=True)
class Prompt:
    """The question that `accel config` asks about an option.

    Attributes:
        default: Answer of a person who only presses return; the launcher's default where None.
        when: Answers that must have been given before, by the name of their option.
        text: The question; the option's help where empty.
        optional: Whether an empty answer is allowed.
    """

    default: str | None = None
    when: tuple[tuple[str, str], ...] = ()
    text: str = ""
    optional: bool = False


@record(frozen=True)
class Option:
    """One thing that can be configured.

    Attributes:
        name: Key in a configuration file, and the command-line flag without its dashes.
        environment: Environment variable that holds it.
        parser: Turns text into the value; raises ValueError for text that it cannot read.
        default: Value where none is given.
        help: One sentence for the command line, the question and the reference.
        choices: Values allowed, empty where any is.
        field: Name of the plugin's field that it fills; that of the table where empty.
        switch: Whether the flag takes no value and means yes.
        launch_parser: Turns text into the value that the launcher hands to the processes; None checks the text with
            `parser` and keeps it.
        launch_default: Value of the launcher where none is given; None leaves the choice to the processes.
        launch_choices: Words that the launcher takes, where they differ from `choices`.
        launch_text: Turns the launcher's value into the text that the processes get.
        always: Whether the processes get `default` where the launcher has no value.
        only_with: Name of an option that has to be above 1 for this one to be handed on.
        asked: The question of `accel config`, or None for no question.
    """

    name: str
    environment: str
    parser: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    field: str = ""
    switch: bool = False
    launch_parser: Callable[[str], Any] | None = None
    launch_default: Any = _UNSET
    launch_choices: tuple[str, ...] = ()
    launch_text: Callable[[Any], str] = str
    always: bool = False
    only_with: str = ""
    prompt: Prompt | None = None

    @property
    def flag(self) -> str:
        """Return the command-line flag."""
        return f"--{self.name}"

    def check(self, value: object, source: str) -> Any:
        """Return `value` where it is allowed, or refuse it."""
        if self.choices:
            expect_one_of(self.choices, self.name, value, f" from {source}")
        return value

    def parse(self, text: str, source: str) -> Any:
        """Read text into a checked value, or refuse it."""
        try:
            value = self.parser(text)
        except ValueError as error:
            raise ConfigurationError(
                f"{self.name} cannot be read; got {text!r} from {source} ({error}). {self.help}"
            ) from None
        return self.check(value, source)

    def read(self) -> Any:
        """Return the value that the environment gives, or the default where the variable is unset or empty."""
        text = environ.text(self.environment)
        if text is None or text == "":
            return self.default
        return self.parse(text, f"the environment variable {self.environment}")

    @property
    def has_launch_default(self) -> bool:
        """Return whether the row gives the launcher's default itself."""
        return self.launch_default is not _UNSET

    def write(self, value: object) -> str:
        """Return the text that the environment of a child process carries for `value`.

        Reading the text with `parse` gives an equal value.
        """
        if isinstance(value, (list, tuple)):
            return ",".join(map(str, value))
        return self.launch_text(value)


def option(
    default: object, help: str, *, parser: Callable[[str], Any] | None = None, environment: str = "", **details: Any
) -> Any:
    """Define one option of a table: an `Option` with these and other fields.

    Its name and variable are those of its field, with the prefixes of the table, and its text is read as its default
    is written, where nothing else is said.
    """
    usual = str if default is None else boolean if isinstance(default, bool) else type(default)
    row = Option("", environment, parser or usual, default, help, **details)
    # None, because a plugin that inherits the table reads what is left open from the environment.
    return dataclasses.field(default=None, metadata={"option": row})


def options_of(table: type) -> tuple[Option, ...]:
    """Return the options of a table in the order of their definition."""
    prefix, variables = getattr(table, "option_prefix", ""), getattr(table, "environment_prefix", "")
    return tuple(
        dataclasses.replace(
            row,
            name=prefix + field.name,
            environment=row.environment or variables + (prefix + field.name).upper(),
            field=row.field or field.name,
        )
        for field in dataclasses.fields(table)
        for row in (field.metadata["option"],)
    )


def option_named(table: type, field: str) -> Option:
    """Return the option of `table` that fills the plugin's field `field`."""
    for candidate in options_of(table):
        if candidate.field == field:
            return candidate
    raise KeyError(field)


def fill(plugin: object, table: type, *fields: str) -> None:
    """Read fields of a plugin that are `None` from the environment, and check those that were given."""
    for field in fields:
        option, value = option_named(table, field), getattr(plugin, field)
        setattr(plugin, field, option.read() if value is None else option.check(value, f"the argument {field}"))


def boolean(text: str) -> bool:
    """Read yes, true, on, 1 or no, false, off, 0, in any case."""
    return bool(environ.str_to_bool(text))


def upper(text: str) -> str:
    """Read a word in upper case."""
    return text.strip().upper()


def member_of(words: list[str]) -> Callable[[str], str]:
    """Return a parser for one of `words`, in any case or by its place counted from 1."""

    def parse(text: str) -> str:
        word = upper(text)
        if word.isdigit() and 1 <= int(word) <= len(words):
            return words[int(word) - 1]
        return word

    return parse


def number_or_auto(number: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser for "auto" or what `number` reads."""

    def parse(text: str) -> object:
        return "auto" if text.strip().lower() == "auto" else number(text)

    return parse


def names(text: str) -> tuple[str, ...]:
    """Read comma-separated words; empty ones are left out."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def boolean_as_text(text: str) -> str:
    """Check that a text says yes or no, and keep it as it is."""
    boolean(text)
    return text.strip()


def one_or_zero(text: str) -> int:
    """Read a truth value as 1 or 0."""
    return int(boolean(text))
