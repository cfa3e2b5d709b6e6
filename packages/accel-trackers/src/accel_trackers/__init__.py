"""Experiment trackers for accel, one file each."""

from accel_trackers._version import __version__

__all__ = ["__version__"]
