"""Fixtures of every test of accel-plan."""

from accel_core.testing.guards import *  # noqa: F403
