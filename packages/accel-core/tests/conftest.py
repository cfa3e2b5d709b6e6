"""Fixtures of every test of accel-core."""

from accel_core.testing.guards import *  # noqa: F403
