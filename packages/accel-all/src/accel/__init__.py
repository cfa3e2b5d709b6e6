"""Everything of accel behind one import."""

from accel._version import __version__

__all__ = ["__version__"]
