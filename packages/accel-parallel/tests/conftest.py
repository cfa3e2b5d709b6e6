"""Fixtures of every test of accel-parallel."""

from accel_core.testing.guards import *  # noqa: F403
