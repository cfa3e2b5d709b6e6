"""Fixtures of every test of accel-torchft."""

from accel_core.testing.guards import *  # noqa: F403
