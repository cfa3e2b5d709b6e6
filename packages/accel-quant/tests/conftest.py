"""Fixtures of every test of accel-quant."""

from accel_core.testing.guards import *  # noqa: F403
