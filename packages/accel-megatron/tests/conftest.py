"""Fixtures of every test of accel-megatron."""

from accel_testing.guards import *  # noqa: F403
