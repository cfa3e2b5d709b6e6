"""What killed processes of a resumed run left: their spool files, and the entries in them that were never sent."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from accel_core.errors import TrackerError
from accel_core.tracking.handle import QUEUED
from accel_trackers import spool

__all__ = ["Left", "left_behind"]

_SENDABLE = QUEUED - {"log_artifact", "log_artifacts"}


class Left(NamedTuple):
    """The spool file of a killed process."""

    path: Path
    entries: list[spool.Line]


def left_behind(own: Path, run_id: str, step: int, trackers: list[str]) -> list[Left]:
    """Find what killed processes of a run left next to its new spool file.

    `accel trackers replay` is left what is damaged or complete, what another machine wrote, and what some tracker
    lacks that the run no longer has, or that needs a logged file.
    """
    found = []
    for path in spool.find(own.parent):
        try:
            file = spool.read(path)
        except TrackerError:
            continue
        # Process numbers of another machine say nothing here.
        killed = not file.ended and file.host == socket.gethostname() and not file.is_written
        if path == own or file.run_id != run_id or not killed:
            continue
        left = Left(path, _lacking(file, step))
        if all(_can_be_sent(entry, trackers) for entry in left.entries):  # all or none, as the file goes afterwards
            found.append(left)
    return found


def _lacking(file: spool.SpoolFile, step: int) -> list[spool.Line]:
    """Return the entries up to a step that trackers lack; the configuration is stored again."""
    entries = []
    lacking = {name: {entry["seq"] for entry in file.unsent(name)} for name in file.trackers}
    for entry in file.entries:
        if entry["kind"] == "log" and entry["filled"] > step:
            break  # what follows is logged again by the steps that come
        only = [name for name, numbers in lacking.items() if entry["seq"] in numbers]
        if only and entry["kind"] != "config":
            entries.append({**entry, "only": only})
    return entries


def _can_be_sent(entry: spool.Line, trackers: list[str]) -> bool:
    return set(entry["only"]) <= set(trackers) and (entry["kind"] == "log" or entry["method"] in _SENDABLE)
