"""Fixtures of every test of accel-bigmodel."""

from accel_testing.guards import *  # noqa: F403
