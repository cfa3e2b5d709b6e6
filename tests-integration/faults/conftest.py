"""Fixtures of the fault tests: leak guards and fresh state."""

from accel_testing.guards import *  # noqa: F403
