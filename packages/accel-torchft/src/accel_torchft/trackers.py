"""The trackers of a run, which go on with another replica where the one dies that speaks for the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_core.logging import get_logger
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.steps import whole_step
from accel_torchft.notes import Notes

_logger = get_logger(__name__)
_STATE = "trackers"
_Kwargs = Mapping[str, Mapping[str, Any]] | None


class ReplicatedHub(TrackerHub):
    """The trackers of one replica: they run where it speaks for the run, and elsewhere only count steps.

    Args:
        hub: What the run has without replicas.
        notes: Where the replica whose trackers run leaves their state, for the one that follows it.
        is_main: Whether they run here at first.
        patience: Seconds for which a run, and so a step, may wait until they have started.
    """

    def __init__(self, hub: TrackerHub, notes: Notes, is_main: bool, patience: float) -> None:
        settings = replace(hub.settings, start_seconds=min(patience, hub.settings.start_seconds))
        super().__init__(hub.log_with, hub.logging_dir, is_main, settings=settings)
        self._notes = notes
        self._begun: tuple[Any, ...] | None = None  # the arguments of `init`; none in a run that is finished

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Start every tracker where this replica speaks for the run, and be ready to elsewhere."""
        super().init(*args, **kwargs)
        self._begun = args, kwargs
        self._publish()

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: _Kwargs = None) -> None:
        """Log values, or count the step as the replica does that logs them."""
        super().log(values, step, log_kwargs)
        if self._begun and not self.running:
            self._steps.place(values, whole_step(step))
        self._publish()

    def finish(self) -> None:
        """Finish every tracker, for good; a second call does nothing."""
        self._begun = self._begun and ()
        super().finish()

    def follow(self, is_main: bool) -> None:
        """Run the trackers from now on, or leave them to another replica."""
        if is_main == self.is_main:
            return
        begun = self._begun
        self.finish()  # those of a replica that was silent, while another one took over
        self.is_main = is_main
        if begun is None and is_main and self._notes.has(_STATE):
            _logger.warning(
                "Trackers go on with another replica where each calls init_trackers; got the call of one that is gone, "
                "and none here, so nothing is tracked any more. Call it outside of any `if` on the main process."
            )
        if not begun:
            return
        if is_main and (state := json.loads(self._notes.read(_STATE, "null"))):
            is_further = self._steps.last >= state["steps"]["last"]
            self.load_state_dict({**state, "steps": self._steps.state_dict()} if is_further else state)
        self.init(*begun[0], **begun[1])

    def _publish(self) -> None:
        if self.running:
            self._notes.write(_STATE, json.dumps(self.state_dict()))
