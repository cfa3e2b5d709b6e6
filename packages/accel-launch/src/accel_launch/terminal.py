"""Colours on a terminal, and none elsewhere."""

from typing import Any

from accel_launch.settings import environ

__all__ = ["colours_wanted", "paint"]

_CODES = {"heading": "1", "flag": "36", "error": "1;31", "faint": "2", "good": "32", "warning": "33"}


def colours_wanted(stream: Any) -> bool:
    """Tell whether text written to `stream` may carry colours.

    Args:
        stream: A text stream.
    """
    return environ.wants_colours(bool(getattr(stream, "isatty", lambda: False)()))


def paint(text: str, kind: str, wanted: bool) -> str:
    """Return `text` in the colour of its kind.

    Args:
        text: What is shown.
        kind: One of heading, flag, error, faint, good, warning.
        wanted: Leave the text as it is where False.
    """
    return f"\033[{_CODES[kind]}m{text}\033[0m" if wanted else text
