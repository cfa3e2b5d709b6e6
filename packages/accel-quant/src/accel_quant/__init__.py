"""8-bit and 4-bit models for accel, through bitsandbytes."""

from accel_quant._version import __version__

__all__ = ["__version__"]
