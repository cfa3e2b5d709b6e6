"""Version of the distribution accel-bigmodel."""

__version__ = "0.1.0"
