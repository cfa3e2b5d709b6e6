"""Asking a person at a terminal, with arrow keys; imported only there, because the prompt library takes its time."""

import sys
from typing import Any

import questionary

from accel_core.errors import ConfigurationError
from accel_launch.questions.question import BACK, Question

__all__ = ["TerminalAsker"]


class TerminalAsker:
    """Questions with arrow keys, defaults and validation while typing."""

    person = True

    def ask(self, question: Question) -> str:
        """Ask one question.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if question.choices:
            back = questionary.Choice("(back)", value=BACK)
            listed: list[Any] = [*question.choices, back]
            default = question.default if question.default in question.choices else None
            answer: Any = questionary.select(question.text, choices=listed, default=default).unsafe_ask()
            return str(answer)
        hint = f"{question.text} (< goes back)"
        answer = questionary.text(
            hint, default=question.default, validate=lambda text: _check(question, text)
        ).unsafe_ask()
        return str(answer)

    def told(self, message: str) -> None:
        """Print the message before the question comes again."""
        print(message, file=sys.stderr)


def _check(question: Question, text: str) -> bool | str:
    if text.strip() == BACK:
        return True
    try:
        question.answer(text)
    except ConfigurationError as error:
        return str(error)
    return True
