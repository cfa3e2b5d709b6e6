"""Asking: with arrow keys on a terminal, from lines of standard input elsewhere; `<` goes one question back."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol, TextIO

from accel_core.errors import ConfigurationError
from accel_launch.questions.question import BACK, Question


class Asker(Protocol):
    """Somebody who can be asked."""

    def ask(self, question: Question) -> str:
        """Return the answer as text, or `BACK`.

        Args:
            question: The question.
        """

    def show(self, message: str) -> None:
        """Say why an answer was not accepted.

        Args:
            message: The reason.
        """

    @property
    def person(self) -> bool:
        """Return whether a person answers, so that a question can be repeated."""


class LineAsker:
    """Answers come as lines, one for each question that is asked; an empty line takes the default."""

    person = False

    def __init__(self, source: TextIO) -> None:
        self._source = source

    def ask(self, question: Question) -> str:
        """Read one line."""
        offered = question.choices if question.here is None else question.here()
        choices = f" [{'/'.join(offered)}]" if offered else ""
        default = f" ({question.default})" if question.default else ""
        print(f"{question.text}{choices}{default}: ", end="", flush=True)
        line = self._source.readline()
        if not line:
            print()
            raise ConfigurationError(
                f"Standard input ended before a question was answered; the question was: {question.text} Give one line "
                "for each question, an empty one for the default."
            )
        print(line.strip())
        return line.strip()

    def show(self, message: str) -> None:
        """Raise it as an error, because a question cannot be repeated on lines of input."""
        raise ConfigurationError(message)


def asker_for(source: TextIO) -> Asker:
    """Return an asker: a person if `source` is a terminal, else lines of input."""
    if not (source.isatty() and sys.stdout.isatty()):
        return LineAsker(source)
    asker: Asker = import_module("accel_launch.questions.keys").TerminalAsker()
    return asker


def ask_all(questions: Sequence[Question], asker: Asker, answers: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask every question whose condition holds."""
    known = dict(answers or {})
    found = dict(known)
    asked: list[int] = []
    place = 0
    while place < len(questions):
        question = questions[place]
        if question.key in known or not question.when(found):
            place += 1
            continue
        text = asker.ask(question if asked else replace(question, back=False))
        if text == BACK:
            if asked:
                place = asked.pop()
                for later in questions[place:]:
                    if later.key not in known:
                        found.pop(later.key, None)
            continue
        try:
            found[question.key] = question.answer(text)
        except ConfigurationError as error:
            asker.show(str(error))
            continue
        asked.append(place)
        place += 1
    return found
