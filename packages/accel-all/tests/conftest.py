"""Every test leaves the process as it found it."""

from accel_testing.guards import *  # noqa: F403
