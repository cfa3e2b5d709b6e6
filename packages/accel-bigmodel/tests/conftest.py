"""Fixtures of every test of accel-bigmodel."""

from accel_core.testing.guards import *  # noqa: F403
