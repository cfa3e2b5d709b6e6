"""Trackers by name on the old paths."""

import pytest

import accelerate
import accelerate.accelerator
import accelerate.tracking
from accel_core.tracking import discovery
from accelerate.tracking import GeneralTracker


class Mine(GeneralTracker):
    """A tracker of a script."""

    name = "mine"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name = run_name
        self.logged: dict[int | None, object] = {}

    def log(self, values: dict[str, object], step: int | None = None, **_kwargs: object) -> None:
        """Keep the values."""
        self.logged[step] = values


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


@pytest.mark.usefixtures("fresh_state")
def test_a_registered_class_is_started_by_its_name() -> None:
    """A class registered after the plain dict was made is started by its name, and takes what is logged."""
    classes = accelerate.tracking.LOGGER_TYPE_TO_CLASS
    accelerate.tracking.register_tracker_class(Mine)
    try:
        accelerator = accelerate.Accelerator(cpu=True, log_with="mine")
        accelerator.init_trackers("project")
        accelerator.log({"loss": 0.5}, step=3)
        tracker = accelerator.get_tracker("mine")
        accelerator.end_training()
    finally:
        del classes["mine"]
    assert tracker.run_name == "project"
    assert tracker.logged == {3: {"loss": 0.5}}
