"""Every test leaves the process as it found it."""

from accel_core.testing.guards import *  # noqa: F403
