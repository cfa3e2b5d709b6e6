"""Checks of a script and a machine: ranks against one process, a resumed run against a straight one, the doctor."""

from accel_verify._version import __version__

__all__ = ["__version__"]
