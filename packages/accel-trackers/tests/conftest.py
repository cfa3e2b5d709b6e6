"""Fixtures of every test of accel-trackers."""

from accel_testing.guards import *  # noqa: F403
