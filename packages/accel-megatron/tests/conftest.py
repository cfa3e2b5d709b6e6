"""Fixtures of every test of accel-megatron."""

from accel_core.testing.guards import *  # noqa: F403
