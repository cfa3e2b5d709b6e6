"""Version of the distribution accel-trackers."""

__version__ = "0.1.0"
