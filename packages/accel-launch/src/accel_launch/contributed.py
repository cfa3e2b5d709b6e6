"""Commands that other distributions offer, found by entry point."""

from accel_core.errors import ConfigurationError
from accel_core.host.installed import points_of
from accel_core.options import engines
from accel_launch.command import AnyCommand

__all__ = ["ENTRY_POINT_GROUP", "commands", "find", "load"]

ENTRY_POINT_GROUP = "accel.commands"
"""Entry-point group under which other distributions offer commands."""


def commands() -> dict[str, str]:
    """Find the commands that other distributions offer, without importing them."""
    return points_of(ENTRY_POINT_GROUP)


def load(word: str, place: str) -> AnyCommand:
    """Import a command that another distribution offers."""
    found: object = engines.load(place)
    if not isinstance(found, AnyCommand):
        raise ConfigurationError(
            f"The entry point of the command `{word}` is not a command; `{place}` gives a "
            f"{type(found).__name__} without all of name, help, add_arguments and run. Update or uninstall the package "
            "that offers it."
        )
    return found


def find(word: str) -> AnyCommand | None:
    """Return the contributed command called `word`, or None."""
    place = commands().get(word)
    return None if place is None else load(word, place)
