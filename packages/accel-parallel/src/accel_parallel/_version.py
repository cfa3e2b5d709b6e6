"""Version of the distribution accel-parallel."""

__version__ = "0.1.0"
