"""Where checkpoints lie: the steps of a save and of a load that differ between a folder and an address in a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from accel_core.checkpoint.address import Address
from accel_core.checkpoint.local import LocalStorage
from accel_core.checkpoint.manifest import Entry, Manifest
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.remote.storage import RemoteStorage
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import World


class Storage(Protocol):
    """One checkpoint where it lies, as one rank sees it.

    A save calls `begin` and `write` on every rank, `commit` on those that lead, `prune`, and `close` on every rank; or
    `abort`. A load calls `newest` where no checkpoint was named, then `open`, `fetch`, `is_replaced` and `close`.
    """

    @property
    def target(self) -> Path:
        """The checkpoint."""

    @property
    def staging(self) -> Path:
        """The folder of this machine that a save writes its files into."""

    @property
    def leads(self) -> bool:
        """Whether this rank completes the save, for all ranks or for those of its machine."""

    def begin(self, ranks: Ranks, identity: str, *, numbered: bool) -> None:
        """Recover what earlier saves left, and make the folder to write into; every rank calls it.

        Args:
            ranks: Those that save.
            identity: The id of the save, the same on all ranks.
            numbered: Whether it is one of a series, whose folders are saved into once.

        Raises:
            ConfigurationError: There is a checkpoint already, and it is `numbered`; or nobody may write there.
            CheckpointError: The folder cannot be made, or not every rank sees it.
        """

    def hooked(self) -> list[str]:
        """Return the names of what save hooks wrote and this rank lists; every rank calls it."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Bring files that this rank has written to where the checkpoint is.

        Args:
            entries: The files, by their names in the checkpoint.
        """

    def sizes(self) -> dict[str, int]:
        """Return the files that have come there, with their sizes; a rank that leads calls it."""

    def commit(self, manifest: Manifest) -> None:
        """Make what was written the checkpoint, in one step; a rank that leads calls it.

        Args:
            manifest: The list of its files, which is written last.

        Raises:
            CheckpointError: It is not committed, and what was there is intact; or it is, and the error says so.
        """

    def abort(self) -> None:
        """Delete what was written, unless it may have been committed; every rank calls it."""

    def prune(self, limit: int) -> None:
        """Delete the oldest of a numbered series, so that `limit` remain; a rank that leads calls it.

        Args:
            limit: How many remain, this one included.
        """

    def newest(self) -> Path:
        """Return the newest complete checkpoint of the series in this folder; the main rank calls it.

        Raises:
            CheckpointNotFoundError: There is none.
        """

    def open(self, ranks: Ranks) -> tuple[Path, Manifest | None]:
        """Return the folder of this machine in which the checkpoint is read, and its manifest; every rank calls it.

        Args:
            ranks: Those that load.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointMismatchError: Ranks see different saves.
            CheckpointDamagedError: The manifest is damaged.
        """

    def fetch(self, wanted: Iterable[str], ranks: Ranks) -> None:
        """Bring the files that ranks of this machine read into the folder that `open` returned; every rank calls it.

        Args:
            wanted: Their names in the checkpoint, as this rank reads them.
            ranks: Those that load.
        """

    def is_replaced(self) -> bool:
        """Return whether another save has been committed since `open`."""

    def close(self) -> None:
        """Give back what a save or a load used on this machine; every rank calls it."""


def storage_of(target: Path, world: World, project: ProjectConfiguration) -> Storage:
    """Return where a checkpoint lies."""
    if isinstance(target, Address):
        return RemoteStorage(world, target, project)
    return LocalStorage(world, target, each_node=project.save_on_each_node)
