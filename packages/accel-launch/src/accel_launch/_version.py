"""Version of the distribution accel-launch."""

__version__ = "0.1.0"
