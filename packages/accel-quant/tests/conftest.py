"""Fixtures of every test of accel-quant."""

from accel_testing.guards import *  # noqa: F403
