"""Fixtures of every test of accel-trackers."""

from accel_core.testing.guards import *  # noqa: F403
