"""The one reader of the environment in accel-launch."""

from collections.abc import Mapping

from accel_core.host import environ

__all__ = ["snapshot", "text", "wants_colors"]

text = environ.text
"""Return an environment variable as text, or a default."""


def snapshot() -> Mapping[str, str]:
    """Return a copy of the whole environment, as the processes that are started inherit it."""
    return environ.snapshot()


def wants_colors(terminal: bool) -> bool:
    """Return whether output may carry colors."""
    if text("NO_COLOR"):
        return False
    if text("FORCE_COLOR"):
        return True
    return terminal and text("TERM") != "dumb"
