"""Fixtures of every test of accel-parallel."""

from accel_testing.guards import *  # noqa: F403
