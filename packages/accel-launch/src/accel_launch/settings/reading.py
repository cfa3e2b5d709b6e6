"""Files that a person names, read within bounds; and what was found in them, as it stands in a message."""

import json
from pathlib import Path

from accel_core.errors import ConfigurationError

__all__ = ["read_json", "read_text", "shortened"]

_LARGEST_FILE = 1 << 18


def shortened(value: object) -> str:
    """Return a value as it stands in a message: on one line, and cut where it is long."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:200])
    return text if len(text) <= 100 else f"{text[:97]}..."


def read_text(path: Path, what: str) -> str:
    """Return the text of a file."""
    try:
        with path.open("rb") as file:
            found = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read; {path} gives: {error.strerror}. Check the name.") from None
    if len(found) > _LARGEST_FILE:
        raise ConfigurationError(f"{what} is too large; {path} has more than {_LARGEST_FILE} bytes. Name another.")
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{what} is not text; {path} is not UTF-8 at byte {error.start}. Save it as UTF-8."
        ) from None


def read_json(path: Path, what: str) -> object:
    """Return what a JSON file holds."""
    text = read_text(path, what)
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is too deep" if isinstance(error, RecursionError) else shortened(str(error))
        raise ConfigurationError(f"{what} is not JSON; {path}: {reason}. Correct it.") from None
    return found
