"""Version of the distribution accelerate."""

__version__ = "1.15.0+accel.0.1.0"
