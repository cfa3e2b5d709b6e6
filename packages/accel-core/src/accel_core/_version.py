"""Version of the distribution accel-core."""

__version__ = "0.1.0"
