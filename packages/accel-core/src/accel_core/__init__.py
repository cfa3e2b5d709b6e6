"""The training loop of accel: processes, devices, data, precision, checkpoints."""

from accel_core._version import __version__

__all__ = ["__version__"]
