"""Accelerate's defaults where accel's own differ: importing the drop-in makes them those of the process."""

from accel_core.plugins.accumulation import set_default_short_window
from accel_core.plugins.loading import set_default_restore_position
from accel_core.tracking.discovery import set_default_missing_library

__all__ = ["choose"]


def choose() -> None:
    """Divide short windows by their full length, pass over trackers without their library, and restore no position."""
    set_default_short_window("full")
    set_default_missing_library("warn")
    set_default_restore_position(False)
