"""Asking a person at a terminal, with arrow keys; imported only there, because the prompt library is slow to import."""

import sys
from dataclasses import replace
from typing import Any

import questionary

from accel_core.errors import ConfigurationError
from accel_launch.questions.question import BACK, Question

_ALL = "*"
"""The choice that shows all others."""


class TerminalAsker:
    """Questions with arrow keys, defaults and validation while typing."""

    person = True

    def ask(self, question: Question) -> str:
        """Ask one question; Ctrl-C raises KeyboardInterrupt."""
        if question.choices:
            offered = question.choices if question.here is None else question.here()
            listed: list[Any] = list(offered)
            if set(offered) != set(question.choices):
                listed.append(questionary.Choice("(hardware that is not here)", value=_ALL))
            if question.back:
                listed.append(questionary.Choice("(back)", value=BACK))
            default = question.default if question.default in offered else None
            answer: Any = questionary.select(question.text, choices=listed, default=default).unsafe_ask()
            return self.ask(replace(question, here=None)) if answer == _ALL else str(answer)
        hint = f"{question.text} (< goes back)" if question.back else question.text
        answer = questionary.text(
            hint, default=question.default, validate=lambda text: _check(question, text)
        ).unsafe_ask()
        return str(answer)

    def show(self, message: str) -> None:
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
