"""Fixtures of every test of accel-torchft."""

from accel_testing.guards import *  # noqa: F403
