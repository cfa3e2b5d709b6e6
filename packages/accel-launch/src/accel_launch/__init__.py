"""The accel command: configure and start runs."""

from accel_launch._version import __version__

__all__ = ["__version__"]
