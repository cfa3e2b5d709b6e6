"""Files that a person names, and their values shortened for messages."""

import json
from pathlib import Path

from accel_core.errors import ConfigurationError


def shortened(value: object) -> str:
    """Return a value for a message: on one line, and cut if it is long."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:200])
    return text if len(text) <= 100 else f"{text[:97]}..."


def read_text(path: Path, what: str) -> str:
    """Return the text of a file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read; {path} gives: {error.strerror}. Check the name.") from None
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
        raise ConfigurationError(f"{what} is not JSON; {path}: {shortened(str(error))}. Correct it.") from None
    return found
