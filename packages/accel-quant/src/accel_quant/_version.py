"""Version of the distribution accel-quant."""

__version__ = "0.1.0"
