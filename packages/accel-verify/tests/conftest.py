"""Fixtures of every test of accel-verify."""

from accel_testing.guards import *  # noqa: F403
