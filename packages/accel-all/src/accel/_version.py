"""Version of the distribution accel-all."""

__version__ = "0.1.0"
