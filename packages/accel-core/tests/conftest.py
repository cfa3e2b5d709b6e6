"""Fixtures of every test of accel-core."""

from accel_testing.guards import *  # noqa: F403
