"""Fixtures of every test of accel-plan."""

from accel_testing.guards import *  # noqa: F403
