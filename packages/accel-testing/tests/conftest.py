"""Fixtures of every test of accel-testing."""

from accel_testing.guards import *  # noqa: F403
