"""Version of the distribution accel-plan."""

__version__ = "0.1.0"
