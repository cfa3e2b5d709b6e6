"""Sending to trackers what stayed in the spool."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_core.errors import TrackerError
from accel_core.tracking import spool
from accel_core.tracking.discovery import LOGGER_TYPE_TO_CLASS, filter_trackers
from accel_core.tracking.entries import call_of
from accel_core.tracking.tracker import GeneralTracker

__all__ = ["Outcome", "replay"]


@dataclass
class Outcome:
    """What became of one tracker's entries of one spool file.

    Attributes:
        path: The spool file.
        tracker: The tracker that had not taken them.
        sent: How many it has now.
        left: How many it still has not.
        error: Why the rest could not be sent.
    """

    path: Path
    tracker: str
    sent: int
    left: int
    error: str | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        tail = f"; {self.left} left: {self.error}" if self.error else ""
        return f"{self.path.name}: {self.tracker}: {self.sent} entries sent{tail}"


def replay(
    place: Path,
    *,
    trackers: Sequence[str] | None = None,
    to: str | None = None,
    logging_dir: str | None = None,
    init: Mapping[str, Any] | None = None,
    keep: bool = False,
) -> list[Outcome]:
    """Send the entries of spool files that trackers do not have.

    What is sent is marked in the file at once, so a second replay sends nothing twice. A file of which every tracker
    has everything is removed.

    Args:
        place: A spool file, or a folder.
        trackers: Only these trackers.
        to: Send to this tracker instead of the one that did not take them.
        logging_dir: Folder for trackers that write to one; by default the folder that holds the spool's.
        init: Keyword arguments of the tracker's constructor.
        keep: Keep files of which everything is sent.

    Returns:
        One outcome for each tracker and file with something to send.

    Raises:
        TrackerError: A damaged file, or one of a run that is still going on.
        ConfigurationError: `to` is unknown.
        MissingDependencyError: The library of `to` is not installed.
    """
    if to is not None:
        filter_trackers(to, logging_dir or ".")
    outcomes: list[Outcome] = []
    for path in spool.find(place):
        found = spool.read(path)
        owing = [name for name in found.trackers if found.unsent(name) and (not trackers or name in trackers)]
        if not owing:
            continue
        _refuse_running(found)
        outcomes += [_send(found, name, to or name.partition("#")[0], logging_dir, dict(init or {})) for name in owing]
        if not keep and not any(map(spool.read(path).unsent, found.trackers)):
            spool.SpoolWriter(path).close(keep=False)
    return outcomes


def _refuse_running(found: spool.SpoolFile) -> None:
    if found.ended or found.host != socket.gethostname() or found.pid == os.getpid():
        return
    try:
        os.kill(found.pid, 0)
    except ProcessLookupError:
        return
    except PermissionError:
        pass
    raise TrackerError(
        f"The run of {found.path} is still going on; its process is {found.pid}. Replay it when the run has ended."
    )


def _send(found: spool.SpoolFile, name: str, target: str, logging_dir: str | None, init: dict[str, Any]) -> Outcome:
    entries = found.unsent(name)
    outcome = Outcome(found.path, name, 0, len(entries))
    marks = spool.SpoolWriter(found.path)
    tracker: GeneralTracker | None = None
    try:
        tracker = _open(found, name, target, logging_dir, init)
        for entry in entries:
            call = call_of(entry, name if target == name.partition("#")[0] else target, tracker.fills_step)
            getattr(tracker, call.method)(*call.args, **(call.kwargs or {}))
            marks.write({"kind": "sent", "tracker": name, "seq": [entry["seq"]]})
            outcome.sent += 1
            outcome.left -= 1
        tracker.finish()
        tracker.release()
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        marks.close(keep=True)
    return outcome


def _open(
    found: spool.SpoolFile, name: str, target: str, logging_dir: str | None, init: dict[str, Any]
) -> GeneralTracker:
    folder = logging_dir if logging_dir is not None else str(found.path.parent.parent)
    filter_trackers(target, folder)
    kind: Any = LOGGER_TYPE_TO_CLASS[target]
    places = (found.project, folder) if kind.requires_logging_directory else (found.project,)
    tracker: GeneralTracker = kind(*places, **init)
    if target == name.partition("#")[0] and found.states.get(name):
        tracker.load_state_dict(found.states[name])
    tracker.start()
    return tracker
