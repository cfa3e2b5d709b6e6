"""Fixtures of every test of the drop-in."""

from accel_core.testing.guards import *  # noqa: F403
