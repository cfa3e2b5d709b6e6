"""Accelerate's defaults where accel's own differ: importing the drop-in makes them those of the process."""

import sys

from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.project import ProjectConfiguration
from accel_core.tracking.settings import TrackerKwargs


def choose() -> None:
    """Divide short windows by their full length, pass over missing trackers, and let scripts skip and save alone."""
    GradientAccumulationPlugin.default_short_window = "full"  # as Accelerate does: a short window counts less
    TrackerKwargs.missing_library = "warn"  # scripts name trackers that are not on every machine
    # Accelerate leaves it to `skip_first_batches`; both would skip twice. A script that uses accel by its own name did
    # not import the drop-in: a library that it uses did.
    DataLoaderConfiguration.default_restore_position = staticmethod(lambda: "accel" in sys.modules)
    # Many scripts save inside `if accelerator.is_main_process`.
    ProjectConfiguration.meets = staticmethod(lambda: "accel" in sys.modules)
