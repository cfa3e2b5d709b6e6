"""Version of the distribution accel-testing."""

__version__ = "0.1.0"
