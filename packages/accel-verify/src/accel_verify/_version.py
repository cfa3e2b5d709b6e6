"""Version of the distribution accel-verify."""

__version__ = "0.1.0"
