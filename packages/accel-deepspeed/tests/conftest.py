"""Fixtures of every test of accel-deepspeed."""

from accel_core.testing.guards import *  # noqa: F403
