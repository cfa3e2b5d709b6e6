"""Sends to trackers what remained in the spool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, TrackerError
from accel_core.tracking import discovery
from accel_core.tracking.handle import QUEUED
from accel_core.tracking.session import Call, describe_error
from accel_core.tracking.tracker import GeneralTracker
from accel_trackers import spool
from accel_trackers.plot import printable

__all__ = ["Outcome", "replay"]

_FILES = ("log_artifact", "log_artifacts")


@dataclass
class Outcome:
    """What became of one tracker's entries of one spool file, or of a file that is refused."""

    path: Path  # the spool file
    tracker: str = ""  # the tracker that had not taken them; empty for a file that is refused
    sent: int = 0  # how many it has now
    left: int = 0  # how many it still has not
    error: str | None = None  # why the rest could not be sent

    def __str__(self) -> str:
        """Return one line."""
        if not self.tracker:
            return printable(f"{self.path.name}: refused: {self.error}")
        tail = f"; {self.left} left: {self.error}" if self.error else ""
        return printable(f"{self.path.name}: {self.tracker}: {self.sent} entries sent{tail}")


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
    has everything is removed. A file that is damaged, or whose run is still going on, is refused alone.

    Raises:
        ConfigurationError: `to` is unknown, or there are spool files and none is of one of `trackers`.
        MissingDependencyError: The library of `to` is not installed.
    """
    if to is not None:
        discovery.filter_trackers(to, logging_dir or ".")
    _check_trackers(place, set(trackers or ()))
    outcomes: list[Outcome] = []
    for path in spool.find(place):
        outcomes += _replay_file(path, trackers, to, logging_dir, dict(init or {}), keep)
    return outcomes


def _check_trackers(place: Path, wanted: set[str]) -> None:
    """Refuse a tracker that no run had: that there is nothing to send it would be taken for a success."""
    try:
        known = {name for path in spool.find(place) for name in spool.read(path).trackers} if wanted else set()
    except TrackerError:  # the file is refused by name, with the others
        return
    if known and wanted - known:
        raise ConfigurationError(
            f"No run below {place} logged to {', '.join(sorted(wanted - known))}; there are "
            f"{', '.join(sorted(known))}. Choose among them with --tracker."
        )


def _replay_file(
    path: Path,
    trackers: Sequence[str] | None,
    to: str | None,
    logging_dir: str | None,
    init: dict[str, Any],
    keep: bool,
) -> list[Outcome]:
    try:
        found = spool.read(path)
        waiting = [name for name in found.trackers if found.unsent(name) and (not trackers or name in trackers)]
        if not waiting:
            return []
        if found.is_written:
            raise TrackerError(
                f"The run of {path} is still going on; its process is {found.pid}. Replay it when the run has ended."
            )
        outcomes = [_send(found, name, to or name.partition("#")[0], logging_dir, init) for name in waiting]
        # Read again, because what was just sent is only marked in the file.
        if not keep and not any(map(spool.read(path).unsent, found.trackers)):
            spool.SpoolWriter(path).close(keep=False)
    except (OSError, TrackerError) as error:
        return [Outcome(path, error=str(error))]
    return outcomes


def _send(found: spool.SpoolFile, name: str, target: str, logging_dir: str | None, init: dict[str, Any]) -> Outcome:
    entries = found.unsent(name)
    outcome = Outcome(found.path, name, 0, len(entries))
    marks = spool.SpoolWriter(found.path)
    try:
        tracker = _open(found, name, target, logging_dir, init)
        for entry in entries:
            call = Call.of(entry, name if target == name.partition("#")[0] else target, tracker.fills_step)
            _carry_out(tracker, call, found)
            marks.write({"kind": "sent", "tracker": name, "seq": [entry["seq"]]})
            outcome.sent += 1
            outcome.left -= 1
        tracker.finish()
        tracker.release()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A library that calls sys.exit must not end the replay of the files after this one.
        outcome.error = describe_error(error)
    finally:
        marks.close(keep=True)
    return outcome


def _carry_out(tracker: GeneralTracker, call: Call, found: spool.SpoolFile) -> None:
    """Make one call of a logging method, with files from the spool's own folder only."""
    if call.method not in QUEUED:
        raise TrackerError(
            f"An entry calls a method that logs nothing; got {call.method!r}. Remove its line; methods that log are "
            f"{', '.join(sorted(QUEUED))}."
        )
    args, kwargs = call.args, call.kwargs or {}
    if call.method in _FILES:
        _check_names([*args[1:], *kwargs.values()], found)
        args = (str(_own_file(args, found)), *args[1:])
    getattr(tracker, call.method)(*args, **kwargs)


def _own_file(args: tuple[Any, ...], found: spool.SpoolFile) -> Path:
    """Return the copy of a logged file, even if the spool was moved; no other file of this machine is sent."""
    own = spool.files_of(found.path)
    if args and isinstance(args[0], str):
        place = own.joinpath(*Path(args[0]).parts[-2:])
        # Resolved: a link in the spool's folder may lead anywhere.
        if place.exists() and place.resolve().is_relative_to(own.resolve()):
            return place
    raise TrackerError(
        f"A logged file lies outside of {own.name}, the spool's own folder; got {args[0] if args else None!r}. Remove "
        "its line, and send it by hand."
    )


def _check_names(names: Sequence[object], found: spool.SpoolFile) -> None:
    for name in names:
        if isinstance(name, str) and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise TrackerError(
                f"{found.path.name} names a place outside of the run's folder; got {name!r}. Change that line, or send "
                "the run by hand."
            )


def _open(
    found: spool.SpoolFile, name: str, target: str, logging_dir: str | None, init: dict[str, Any]
) -> GeneralTracker:
    folder = logging_dir if logging_dir is not None else str(found.path.absolute().parent.parent)
    discovery.filter_trackers(target, folder)
    kind: type[Any] = discovery.LOGGER_TYPE_TO_CLASS[target]
    if kind.requires_logging_directory:
        _check_names([found.project], found)
    places = (found.project, folder) if kind.requires_logging_directory else (found.project,)
    tracker: GeneralTracker = kind(*places, **init)
    if target == name.partition("#")[0] and found.states.get(name):
        tracker.load_state_dict(found.states[name])
    tracker.start()
    return tracker
