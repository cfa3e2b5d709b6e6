"""What accel's own tests are made of, for third-party strategies, trackers and devices as well."""

from accel_testing import limits
from accel_testing._version import __version__
from accel_testing.requires import requires
from accel_testing.world import world

__all__ = ["__version__", "limits", "requires", "world"]
