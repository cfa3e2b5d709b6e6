"""Trackers by name on the old paths."""

import accelerate
import accelerate.accelerator
import accelerate.tracking
from accel_core.tracking import discovery
from accelerate.tracking import GeneralTracker


class Mine(GeneralTracker):
    """A tracker of a script."""

    name = "mine"
    requires_logging_directory = False


def test_the_classes_are_a_dict_that_the_engine_reads() -> None:
    """Both old paths have one plain dict; what a script puts in and takes out is known to the engine."""
    classes = accelerate.tracking.LOGGER_TYPE_TO_CLASS
    assert type(classes) is dict
    assert accelerate.accelerator.LOGGER_TYPE_TO_CLASS is discovery.LOGGER_TYPE_TO_CLASS is classes
    assert classes["tensorboard"] is accelerate.tracking.TensorBoardTracker
    classes["mine"] = Mine
    assert discovery.is_available("mine")
    assert accelerate.tracking.filter_trackers(["mine"]) == ["mine"]
    del classes["mine"]
    assert not discovery.is_available("mine")
