"""One resolver: flag over environment over file over default, with a record of where each value comes from."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.settings.given import given
from accel_launch.settings.layout import ProcessLayout, layout_of
from accel_launch.settings.model import Setting
from accel_launch.settings.reading import shortened
from accel_launch.settings.resolved import Resolved


@dataclass(frozen=True)
class Settings(Mapping[str, Any]):
    """The settings of a run, each with its origin."""

    resolved: Mapping[str, Resolved]
    script: str | None = None  # None where only a look was asked for
    arguments: tuple[str, ...] = ()
    inherited: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None
    file_order: tuple[str, ...] = ()  # settings that the file says, in its own order
    config: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """Return the value of a setting."""
        return self.resolved[key].value

    def __iter__(self) -> Iterator[str]:
        """Walk over the keys."""
        return iter(self.resolved)

    def __len__(self) -> int:
        """Return the number of settings."""
        return len(self.resolved)

    def source(self, key: str) -> str:
        """Return where a setting comes from, for a message: the flag, the variable, the file and line."""
        return self.resolved[key].source(key)

    def is_set(self, key: str) -> bool:
        """Return whether the setting was given anywhere, and is not the default."""
        return self.resolved[key].origin != "default"

    @cached_property
    def layout(self) -> ProcessLayout:
        """Where the processes are, worked out once."""
        return layout_of(self.resolved, self.inherited)


def resolve(
    table: Iterable[Setting],
    args: argparse.Namespace,
    *,
    environment: Mapping[str, str],
    cluster: Mapping[str, Resolved] | None = None,
    file: Mapping[str, Resolved] | None = None,
) -> dict[str, Resolved]:
    """Decide every setting.

    Raises:
        ConfigurationError: A flag, a variable or a file has a value that cannot be read or is not allowed.
    """
    table = tuple(table)
    written = written_in(table, args)
    decided: dict[str, Resolved] = {}
    for setting in table:
        if setting.key in decided:
            continue
        sources: list[Resolved] = []
        if setting.key in written:
            flag = setting.words[-1]
            sources.append(Resolved(checked(setting, getattr(args, setting.key), flag), "flag", flag))
        text = environment.get(setting.environment, "") if setting.environment else ""
        if text != "":
            sources.append(
                Resolved(read(setting, text, f"the variable {setting.environment}"), "environment", setting.environment)
            )
        for source in (cluster, file):
            if source and setting.key in source:
                # Also where a flag wins: a wrong file is reported at once.
                checked(setting, source[setting.key].value, source[setting.key].where)
                sources.append(source[setting.key])
        sources.append(Resolved(setting.default, "default", "default"))
        first = sources[0]
        decided[setting.key] = Resolved(first.value, first.origin, first.where, tuple(sources[1:]))
    return decided


def resolve_file(settings: Mapping[str, Setting], values: Mapping[str, tuple[object, str]]) -> dict[str, Resolved]:
    """Return the values of a file, given with their places, with texts parsed by their settings."""
    return {
        key: Resolved(read(settings[key], value, where) if isinstance(value, str) else value, "file", where)
        for key, (value, where) in values.items()
    }


def written_in(table: Iterable[Setting], args: argparse.Namespace) -> set[str]:
    """Return the settings that a command line says."""
    changed = {
        setting.key
        for setting in table
        if getattr(args, setting.key, setting.default) not in (setting.default, _parsed_default(setting))
    }
    return given(args) | (changed - {"tpu_use_cluster"})  # programs that make a namespace leave no words


def _parsed_default(setting: Setting) -> Any:
    return setting.parse(setting.default) if isinstance(setting.default, str) else setting.default


def read(setting: Setting, text: str, where: str) -> Any:
    """Turn what was written into the value of a setting.

    Raises:
        ConfigurationError: It cannot be read, or is not allowed.
    """
    try:
        value = choose(setting, text)
    except ValueError:
        raise _not_valid(setting, text, where) from None
    # An engine's value goes to the processes as it was written, as in Accelerate.
    return checked(setting, value if setting.option is None else setting.parse(text), where)


def choose(setting: Setting, text: str) -> Any:
    """Return the value that a text means, a choice in capitals too; raise ValueError where it means none."""
    value = setting.parse(text)
    if not setting.choices or value in setting.choices:
        return value
    # Files of Accelerate write NO and INDUCTOR, and so does the launcher, for the processes that it starts.
    for choice in setting.choices:
        if str(choice).lower() == str(value).lower():
            return choice
    raise ValueError(text)


def checked(setting: Setting, value: Any, where: str) -> Any:
    """Return a value that the setting allows, or refuse it."""
    if setting.rule is None or value is None or setting.rule.holds(value):
        return value
    raise _not_valid(setting, value, where)


def _not_valid(setting: Setting, value: object, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{setting.key} is not valid; got {shortened(str(value))!r} from {where}. {remedy(setting, value)}"
    )


def remedy(setting: Setting, value: object) -> str:
    """Return in words what a setting takes, with the choice that a value was probably meant to be."""
    near = get_close_matches(str(value).lower(), map(str, setting.offered), n=1)
    return (f"Did you mean {near[0]}? " if near else "") + f"Give it {_wanted(setting)}."


def _wanted(setting: Setting) -> str:
    if setting.choices:
        return f"one of {', '.join(map(str, setting.offered))}"
    if setting.rule is not None:
        return setting.rule.wanted
    if setting.yes_or_no:
        return "yes or no"
    if setting.parse is int:
        return "a whole number"
    return "a number" if setting.parse is float else "another value"
