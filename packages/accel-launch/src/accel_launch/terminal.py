"""What a person sees: lines on standard error, colored on a terminal only."""

import contextlib
import sys
from typing import TextIO

from accel_core.host import environ

_CODES = {"heading": "1", "flag": "36", "error": "1;31", "faint": "2", "good": "32", "warning": "33"}


def say(text: str) -> None:
    """Print a line on standard error."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """Print what takes a while, on a terminal only."""
    if colors_wanted(sys.stderr):
        say(paint(text, "faint", True))


def flush_output() -> None:
    """Flush what was printed, if possible, so that it appears before output of other processes."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()


def colors_wanted(stream: TextIO | None) -> bool:
    """Return whether text written to `stream` may carry colors."""
    if environ.text("NO_COLOR"):
        return False
    terminal = stream is not None and stream.isatty() and environ.text("TERM") != "dumb"
    return terminal or bool(environ.text("FORCE_COLOR"))


def paint(text: str, kind: str, wanted: bool) -> str:
    """Return `text` in the color of its kind."""
    return f"\033[{_CODES[kind]}m{text}\033[0m" if wanted else text
