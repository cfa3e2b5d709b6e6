"""Load and run models larger than one device."""

from accel_bigmodel._version import __version__

__all__ = ["__version__"]
