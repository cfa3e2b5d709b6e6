"""Curves of runs, read from spool files and from TensorBoard's event files."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from accel_core.errors import MissingDependencyError, TrackerError
from accel_core.tracking.session import describe_error
from accel_trackers import spool
from accel_trackers.values import sort

__all__ = ["RecordedCurves", "read_runs"]

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class RecordedCurves:
    """The numbers of one run."""

    label: str
    started: float  # seconds since 1970
    curves: dict[str, Curve]


def read_runs(place: Path) -> tuple[list[RecordedCurves], list[str]]:
    """Read all runs below a path, the oldest first.

    Raises:
        MissingDependencyError: There are event files, and tensorboard is not installed.
    """
    events = [place] if place.is_file() and "tfevents" in place.name else []
    events = events or sorted(path for path in place.rglob("*tfevents*") if path.is_file())
    files = [] if events == [place] else spool.find(place)
    folders = sorted({path.parent for path in events})
    read = [_from_spool(path) for path in files] + [_from_events(folder, place) for folder in folders]
    runs = [found for found in read if isinstance(found, RecordedCurves)]
    refused = [found for found in read if isinstance(found, str)]
    return sorted((run for run in runs if run.curves), key=lambda run: run.started), refused


def _from_spool(path: Path) -> RecordedCurves | str:
    """Return the run of a spool file, or why the file is refused."""
    try:
        found = spool.read(path)
    except TrackerError as error:
        return str(error)
    curves: dict[str, Curve] = {}
    for entry in found.entries:
        if entry["kind"] == "log":
            for name, number in sort(entry["values"]).numbers.items():
                curves.setdefault(name, []).append((entry["filled"], float(number)))
    return RecordedCurves(f"{found.project}  {_when(found.started)}  run {found.run_id}", found.started, curves)


def _from_events(folder: Path, place: Path) -> RecordedCurves | str:
    """Return the run of a folder of event files, or why tensorboard does not read them."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise MissingDependencyError(
            f"Event files can be read by tensorboard only, which is not installed; got some in {folder}. Install it: "
            'pip install "accel-trackers[tensorboard]"'
        ) from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    try:
        events.Reload()
        curves: dict[str, Curve] = {
            tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
        started = float(events.FirstEventTimestamp())
    except Exception as error:
        # A wrong byte can raise any error: protobuf's, a file's, or the reader's own.
        what = describe_error(error)
        return f"The event files in {folder} cannot be read by tensorboard; it raised {what}. Remove them."
    name = str(folder.relative_to(place)) if folder != place and folder.is_relative_to(place) else folder.name
    return RecordedCurves(f"{name}  {_when(started)}  event files", started, curves)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
