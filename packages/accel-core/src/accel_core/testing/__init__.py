"""What accel's own tests are made of, for third-party strategies, trackers and devices as well."""

from accel_core.testing import limits
from accel_core.testing.requires import requires
from accel_core.testing.world import world

__all__ = ["limits", "requires", "world"]
