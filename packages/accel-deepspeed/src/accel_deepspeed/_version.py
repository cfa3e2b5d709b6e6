"""Version of the distribution accel-deepspeed."""

__version__ = "0.1.0"
