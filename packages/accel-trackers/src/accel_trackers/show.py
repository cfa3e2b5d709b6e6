"""What `accel trackers show` does: reads runs from event files and from files of undelivered calls, and draws them."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, MissingDependencyError, TrackerError
from accel_core.tracking.queues import describe_error
from accel_core.tracking.undelivered import PREFIX
from accel_trackers.plot import draw, printable
from accel_trackers.values import sort

_MARKS = "•+xo*#@%"


@dataclass(frozen=True)
class _Run:
    """The numbers of one run."""

    label: str
    started: float  # seconds since 1970
    curves: dict[str, list[tuple[float, float]]]


def run(arguments: argparse.Namespace) -> int:
    """Draw the curves of the last runs.

    Raises:
        ConfigurationError: A name or number is not valid, or there is nothing to draw.
        MissingDependencyError: There are event files, and tensorboard is not installed.
        TrackerError: The file or folder does not exist.
    """
    sizes = arguments.last, arguments.width, arguments.height
    if min(sizes) < 1:
        raise ConfigurationError(f"A plot needs runs, columns and rows; got {sizes} of them. Use numbers of 1 or more.")
    place = Path(arguments.folder)
    runs = sorted((found for found in _read(place) if found.curves), key=lambda found: found.started)[-arguments.last :]
    names = list(dict.fromkeys(name for found in runs for name in found.curves))
    unknown = sorted(set(arguments.name or ()) - set(names))
    if unknown or not names:
        raise ConfigurationError(
            f"There is nothing to draw of {', '.join(unknown) or 'any value'} below {place}; the event files and the "
            f"files {PREFIX}*.jsonl there have {', '.join(names) or 'no numbers'}. Name another folder or other values."
        )
    marked = dict(zip(_MARKS, runs, strict=False))
    lines = [f"{mark} {printable(found.label)}" for mark, found in marked.items()]
    for name in arguments.name or names:
        curves = {mark: found.curves[name] for mark, found in marked.items() if name in found.curves}
        lines += ["", draw(printable(name), curves, width=arguments.width, height=arguments.height)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _read(place: Path) -> Iterator[_Run]:
    """Give all runs below a path."""
    try:
        place.stat()
    except OSError as error:
        raise TrackerError(
            f"There is no file or folder {place}; the system says {error.strerror or error}. Name a logging directory."
        ) from error
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    kept = [path for path in files if path == place or "tfevents" in path.name or path.name.startswith(PREFIX)]
    for source in dict.fromkeys(path.parent if "tfevents" in path.name else path for path in kept):
        yield from _runs_of(source, place)


def _runs_of(source: Path, place: Path) -> list[_Run]:
    """Return the runs of a folder of event files, or of a file of undelivered calls; none, with a word, if it fails."""
    try:
        return [_from_events(source, place)] if source.is_dir() else _from_lines(source)
    except MissingDependencyError:
        raise
    except Exception as error:
        # A wrong byte can raise any error: protobuf's, a file's, or the reader's own.
        what = describe_error(error)
        sys.stderr.write(printable(f"{source} cannot be read, and is left out; it raised {what}.") + "\n")
        return []


def _from_lines(path: Path) -> list[_Run]:
    runs: dict[tuple[str, str], _Run] = {}
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        line: dict[str, Any] = (
            json.loads(text) if text.endswith("\n") else {"method": None}
        )  # the process ended while it wrote
        if line["method"] == "log":
            label = f"{line['project']}  {_when(line['time'])}  undelivered to {line['tracker']}"
            found = runs.setdefault((line["run"], line["tracker"]), _Run(label, line["time"], {}))
            for name, number in sort(line["args"][0]).numbers.items():
                found.curves.setdefault(name, []).append((float(line["step"]), float(number)))
    return list(runs.values())


def _from_events(folder: Path, place: Path) -> _Run:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise MissingDependencyError(
            f"Event files can be read by tensorboard only, which is not installed; got some in {folder}. Install it: "
            'pip install "accel-trackers[tensorboard]"'
        ) from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    started = float(events.FirstEventTimestamp())
    name = str(folder.relative_to(place)) if folder != place and folder.is_relative_to(place) else folder.name
    return _Run(f"{name}  {_when(started)}  event files", started, curves)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
