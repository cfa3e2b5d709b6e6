"""The accel command: configure, start and diagnose runs."""

from accel_launch._version import __version__

__all__ = ["__version__"]
