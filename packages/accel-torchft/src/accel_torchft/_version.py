"""Version of the distribution accel-torchft."""

__version__ = "0.1.0"
