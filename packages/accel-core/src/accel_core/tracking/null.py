"""Trackers of ranks and runs that do not track: the same attributes, and nothing happens."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from accel_core.tracking.handle import NULL_RUN, NullRun, TrackerHandle, do_nothing
from accel_core.tracking.tracker import GeneralTracker

__all__ = ["NULL_RUN", "NullRun", "null_tracker"]


class _NoQueue(NamedTuple):
    name: str
    kind: type[GeneralTracker]
    tracker: None = None


def null_tracker(like: type[GeneralTracker] | GeneralTracker) -> GeneralTracker:
    """Return a tracker of the same class and name whose methods and attributes do nothing."""
    kind = like if isinstance(like, type) else type(like)
    name = getattr(like, "name", None)
    queue: Any = _NoQueue(name if isinstance(name, str) else kind.__name__, kind)
    return cast(GeneralTracker, TrackerHandle(queue, do_nothing, do_nothing))
