"""Version of the distribution accel-megatron."""

__version__ = "0.1.0"
