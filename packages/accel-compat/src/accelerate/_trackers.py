"""Trackers by name as the plain dict that Accelerate has.

accel's own mapping imports a tracker when it is asked for. Who takes it from an old path may change it, and ask what it
is, as a dict: from then on it is one, for the engine too.
"""

from accel_core.tracking import discovery

LOGGER_TYPE_TO_CLASS = dict(discovery.LOGGER_TYPE_TO_CLASS)
discovery.LOGGER_TYPE_TO_CLASS = LOGGER_TYPE_TO_CLASS
