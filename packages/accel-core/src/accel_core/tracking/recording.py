"""How a run is recorded until its trackers have everything: by another distribution, found by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from accel_core.errors import MissingDependencyError
from accel_core.host.installed import points_of
from accel_core.options.engines import load
from accel_core.tracking.settings import TrackerKwargs

__all__ = ["ENTRY_POINT_GROUP", "Recorder", "RecorderFactory", "recorder_for"]

ENTRY_POINT_GROUP = "accel.recorders"
"""Entry-point group in which a distribution offers a `RecorderFactory`; accel-trackers offers the spool file."""


class Recorder(Protocol):
    """Writes down what a run logs. Nothing waits for its disk but `drain`, `keep_file` and `close`."""

    @property
    def path(self) -> Path | None:
        """Where the record is; `None` before it is opened and where that failed."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Queue a line. Lines with a `seq` are entries for trackers; a line that cannot be written causes a warning.

        Args:
            line: Values that JSON can hold.
        """

    def keep_file(self, path: str, seconds: float) -> str:
        """Copy a file or folder, so that its owner may remove it.

        Args:
            path: The file or folder.
            seconds: Longest time to wait.

        Returns:
            Path of the copy.

        Raises:
            OSError: It cannot be copied, or not within `seconds`.
        """

    def take_over(self, run_id: str, step: int, seconds: float) -> list[Mapping[str, Any]]:
        """Return what processes of a run that were killed had not sent of what they logged up to a step.

        Their records go when the line `resumed` is written, which the hub queues behind these entries.

        Args:
            run_id: The run that continues here.
            step: Where it continues; what was logged later is logged again.
            seconds: Longest wait for the disk; past it, the records stay for another time.

        Returns:
            Entries, each with the trackers that lack it in `only`.
        """

    def drain(self, seconds: float) -> bool:
        """Wait until every line is written.

        Args:
            seconds: Longest time to wait.

        Returns:
            Whether every line is written.
        """

    def close(self, unsent: Mapping[str, frozenset[int]], *, keep: bool, seconds: float, quiet: bool) -> None:
        """End the record, waiting no longer than `seconds`; remove it unless it is kept or something is unsent.

        Args:
            unsent: By tracker, the `seq` of the entries that it did not take. Where they are, or that they are lost, is
                a warning.
            keep: Keep the record also where everything is sent.
            seconds: Longest wait for the disk.
            quiet: Warn of nothing.
        """


class RecorderFactory(Protocol):
    """Makes the recorder of a run; waits for no disk."""

    def __call__(self, folder: Path, run: Mapping[str, Any]) -> Recorder:
        """Begin a record in a folder."""


def recorder_for(settings: TrackerKwargs) -> RecorderFactory | None:
    """Return the factory of the recorder that is installed, or `None` if there is none.

    Raises:
        MissingDependencyError: The settings ask for a spool, but nothing is installed that writes one.
    """
    for place in points_of(ENTRY_POINT_GROUP).values():
        factory: RecorderFactory = load(place)
        return factory
    if settings.spool_dir is None and not settings.keep_spool:
        return None
    asked = f"spool_dir={str(settings.spool_dir)!r}" if settings.spool_dir is not None else "keep_spool=True"
    raise MissingDependencyError(
        "The spool of a run is written by accel-trackers, which is not installed; got TrackerKwargs("
        f"{asked}). Install it: pip install accel-trackers"
    )
