"""What a question is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from accel_core.errors import ConfigurationError
from accel_launch.settings.model import Setting
from accel_launch.settings.resolve import read
from accel_launch.settings.table import BY_KEY

BACK = "<"
"""The answer that goes one question back."""

Answers = Mapping[str, Any]
"""What was answered so far, by the key of the question."""

When: TypeAlias = Callable[[Answers], bool]
"""Decides from earlier answers whether to ask."""


def always(answers: Answers) -> bool:
    """Ask in any case."""
    return True


@dataclass(frozen=True)
class Question:
    """One question of the dialogue.

    Attributes:
        key: Name of the answer.
        text: What is asked.
        choices: Answers to choose from, empty for free text.
        default: The answer of a person who only presses return.
        parse: Turns text into the answer; raises ValueError or ConfigurationError for text that it cannot read.
        when: Tells from earlier answers whether to ask.
        path: Keys that lead to the answer in the configuration file; empty for an answer that only steers.
        optional: Whether an empty answer is allowed.
        here: Returns the choices that this machine has; a person who wants another one asks for all.
        back: Whether there is a question before it.
    """

    key: str
    text: str
    choices: tuple[str, ...] = ()
    default: str = ""
    parse: Callable[[str], Any] = str
    when: When = always
    path: tuple[str, ...] = ()
    optional: bool = False
    here: Callable[[], tuple[str, ...]] | None = None
    back: bool = True

    def answer(self, text: str) -> Any:
        """Read an answer."""
        answer = text.strip() or self.default
        if not answer and self.optional:
            return None
        if self.choices and answer not in self.choices:
            if answer.isdigit() and int(answer) < len(self.choices):
                answer = self.choices[int(answer)]
            else:
                raise ConfigurationError(
                    f"{self.text} cannot be answered with {answer!r}. Choose one of {', '.join(self.choices)}."
                )
        if not answer:
            raise ConfigurationError(f"{self.text} needs an answer; got none. Type one.")
        try:
            return self.parse(answer)
        except ConfigurationError:  # a ValueError too, which has said more already
            raise
        except ValueError:
            raise ConfigurationError(f"{self.text} cannot be answered with {answer!r}. Try again.") from None


def from_setting(
    setting: Setting, when: When, *, text: str = "", default: str | None = None, optional: bool = False
) -> Question:
    """Make a question of a launch setting."""
    choices = ("no", "yes") if setting.yes_or_no and not setting.choices else tuple(map(str, setting.offered))
    if setting.default in ("true", "false"):
        choices = ("true", "false")
    fallback = setting.default
    if setting.yes_or_no and choices == ("no", "yes"):
        fallback = "yes" if fallback else "no"
    return Question(
        key=setting.key,
        text=text or setting.help.rstrip("."),
        choices=choices,
        default=default if default is not None else str("" if fallback is None else fallback),
        parse=lambda answer: read(setting, answer, "the answer"),
        when=when,
        path=setting.path,
        optional=optional,
    )


def from_key(key: str, when: When, *, text: str = "", default: str | None = None, optional: bool = False) -> Question:
    """Make a question of the launch setting called `key`."""
    return from_setting(BY_KEY[key], when, text=text, default=default, optional=optional)


def answered(*wanted: tuple[str, str]) -> When:
    """Return a condition: that earlier answers are these, by the key of their question."""
    return lambda answers: all(str(answers.get(key)) == value for key, value in wanted)


def on_several_machines(answers: Answers) -> bool:
    """Return whether several machines take part."""
    return int(answers.get("num_machines") or 1) > 1


def from_options(engine: str, *wanted: tuple[str, str]) -> tuple[Question, ...]:
    """Make an engine's questions from the rows of its options, for a run with these answers."""
    found = []
    for setting in BY_KEY.values():
        prompt = setting.option.prompt if setting.option is not None and setting.engine == engine else None
        if prompt is not None:
            when = answered(*wanted, *prompt.when)
            found.append(
                from_setting(setting, when, text=prompt.text, default=prompt.default, optional=prompt.optional)
            )
    return tuple(found)
