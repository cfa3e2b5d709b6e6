"""A value of a setting, with where it comes from."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resolved:
    """The value of a setting and where it comes from.

    Attributes:
        value: The value, parsed.
        origin: The kind of source, the strongest first: flag, environment, cluster (a scheduler's own variables), file
            or default.
        where: The flag, the variable, the file and line, or a few words.
        overridden: The values of weaker sources, the strongest first.
    """

    value: Any
    origin: str
    where: str
    overridden: tuple["Resolved", ...] = ()

    def source(self, key: str) -> str:
        """Return where the value comes from, for a message: the flag, the variable, the file and line."""
        return f"the default of {key}" if self.origin == "default" else self.where
