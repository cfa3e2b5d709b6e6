"""Commands that other distributions offer, found by entry point."""

from importlib.metadata import EntryPoint, entry_points

from accel_core.errors import ConfigurationError
from accel_launch.command import AnyCommand

__all__ = ["ENTRY_POINT_GROUP", "commands", "find", "load"]

ENTRY_POINT_GROUP = "accel.commands"
"""Entry-point group under which other distributions offer commands."""


def commands() -> dict[str, EntryPoint]:
    """Find the commands that other distributions offer, without importing them."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def load(point: EntryPoint) -> AnyCommand:
    """Import a command that another distribution offers."""
    found: object = point.load()
    if not isinstance(found, AnyCommand):
        raise ConfigurationError(
            f"The entry point of the command `{point.name}` is not a command; `{point.value}` gives a "
            f"{type(found).__name__} without all of name, help, add_arguments and run. Update or uninstall the package "
            "that offers it."
        )
    return found


def find(word: str) -> AnyCommand | None:
    """Return the contributed command called `word`, or None."""
    point = commands().get(word)
    return None if point is None else load(point)
