"""Tables of text, and the files that a command writes what it found to."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from accel_core.errors import ConfigurationError


def write_output(place: str | None, make: Callable[[], str]) -> None:
    """Write a text to the file that a command line names, if it names one, and say so."""
    if not place:
        return
    try:
        Path(place).write_text(make(), encoding="utf-8")
    except OSError as failure:
        raise ConfigurationError(
            f"The file cannot be written; {place} gives: {failure.strerror}. Name another, in a folder that exists."
        ) from None
    sys.stdout.write(f"Wrote {place}.\n")


def draw_table(lines: Sequence[Sequence[str]]) -> str:
    """Draw a table, its first line the heads; the first column begins at the left, all others end at the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    drawn = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    ]
    return "\n".join([drawn[0], "  ".join("-" * width for width in widths), *drawn[1:]])
