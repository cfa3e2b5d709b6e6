"""Which of several sayings counts: argument > command line > environment > file > default.

`resolve` is the only place that states this precedence. It also keeps, for every option, who said it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.host import environ
from accel_core.options.option import Option, options_of

__all__ = ["Resolution", "Setting", "Source", "environment_of", "resolve"]

T = TypeVar("T")


class Source(enum.Enum):
    """Who said a value, strongest first."""

    ARGUMENT = "argument"
    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@record(frozen=True)
class Setting:
    """The value of one option and where it comes from.

    Attributes:
        value: The value that counts.
        source: Who said it.
        place: What to look at to change it: a parameter, a flag, a variable or a key.
    """

    value: Any
    source: Source
    place: str


@record(frozen=True)
class Resolution(Generic[T]):
    """All options of a table, decided.

    Attributes:
        values: An instance of the table.
        settings: For every option's name, its value and who said it.
    """

    values: T
    settings: dict[str, Setting]


def resolve(
    table: type[T],
    *,
    argument: Mapping[str, Any] | None = None,
    command_line: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
) -> Resolution[T]:
    """Decide every option of a table.

    A `None` value counts as nothing said, and so does an empty environment variable. Text from any source is parsed;
    other values are taken as they are. Only options of the table are looked up in `environment` and `file`, which
    usually hold more.

    Args:
        table: A class whose fields are made by `option`.
        argument: Values given in code, by option name.
        command_line: Values given as flags, by option name.
        environment: Environment variables; those of this process where `None`.
        file: Values of a configuration file, by option name.

    Returns:
        The decided values, with who said each.

    Raises:
        ConfigurationError: An argument or flag is not an option of the table, or the value that counts cannot be read
            or is not allowed.
    """
    options = options_of(table)
    known = {option.name for option in options}
    for said, source in ((argument, Source.ARGUMENT), (command_line, Source.COMMAND_LINE)):
        for name in said or {}:
            if name not in known:
                raise ConfigurationError(
                    f"{name!r} is no option of {table.__name__}, though the {source.value} gives it. "
                    f"Use one of {sorted(known)}."
                )
    settings = {
        option.name: _decide(option, argument or {}, command_line or {}, environment, file or {}) for option in options
    }
    return Resolution(table(**{name: setting.value for name, setting in settings.items()}), settings)


def environment_of(table: type, settings: Mapping[str, Setting], *, defaults: bool = False) -> dict[str, str]:
    """Return the environment variables that carry settings to a child process.

    Args:
        table: The table that the settings belong to.
        settings: Decided settings, by option name.
        defaults: Also write those that nobody said.

    Returns:
        Variable names and texts. A `None` value has no text and is left out.
    """
    written = {}
    for option in options_of(table):
        setting = settings.get(option.name)
        if setting is None or setting.value is None or (setting.source is Source.DEFAULT and not defaults):
            continue
        written[option.environment] = option.write(setting.value)
    return written


def _decide(
    option: Option,
    argument: Mapping[str, Any],
    command_line: Mapping[str, Any],
    environment: Mapping[str, str] | None,
    file: Mapping[str, Any],
) -> Setting:
    variable = environ.text(option.environment) if environment is None else environment.get(option.environment)
    sayings = (
        (Source.ARGUMENT, option.name, argument.get(option.name)),
        (Source.COMMAND_LINE, option.flag, command_line.get(option.name)),
        (Source.ENVIRONMENT, option.environment, variable or None),
        (Source.FILE, option.name, file.get(option.name)),
    )
    for source, place, said in sayings:
        if said is not None:
            said_by = f"the {source.value} ({place})"
            value = option.parse(said, said_by) if isinstance(said, str) else option.check(said, said_by)
            return Setting(value, source, place)
    return Setting(option.default, Source.DEFAULT, option.name)
