"""Fixtures of every test of accel-deepspeed."""

from accel_testing.guards import *  # noqa: F403
