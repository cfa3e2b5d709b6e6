"""Drop-in distribution: the import paths of Accelerate 1.15.0 over accel."""

from accelerate._version import __version__

__all__ = ["__version__"]
