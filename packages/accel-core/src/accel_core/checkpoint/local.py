"""Checkpoints in folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import commit, names
from accel_core.checkpoint.manifest import Entry, Manifest, owned_files
from accel_core.checkpoint.ranks import Ranks
from accel_core.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError
from accel_core.process.world import World

_SHOWN = 10


@record
class LocalStorage:
    """A checkpoint in a folder that all ranks see, or, saved on each node, those of a machine."""

    world: World
    target: Path
    each_node: bool = False
    staging: Path = Path()
    leads: bool = False
    made: bool = False  # whether the target was not there before
    head: Manifest | None = None  # of the checkpoint that is loaded

    def begin(self, ranks: Ranks, identity: str, *, numbered: bool) -> None:
        """Make the hidden folder, on the main rank first: the others see then whether their disk is another one.

        Args:
            ranks: Those that save.
            identity: The id of the save, the same on all ranks.
            numbered: Whether it is one of a series, whose folders are saved into once.

        Raises:
            ConfigurationError: There is a checkpoint already, and it is `numbered`; or nobody may write there.
            CheckpointError: The folder cannot be made, or not every rank sees it.
        """
        doing = f"Preparing the checkpoint {str(self.target)!r}"
        self.staging = commit.staging_of(self.target, identity)
        for makes in (self.world.is_main, self.world.is_local_main)[: 1 + self.each_node]:
            with ranks.together(doing):
                if makes and not self.staging.is_dir():
                    self.leads, self.made = True, not self.target.exists()
                    commit.stage(self.target, identity, numbered=numbered)
        with ranks.together(doing):
            if not self.staging.is_dir():
                raise CheckpointError(
                    f"Rank {self.world.rank} does not see the folder that the main process made in "
                    f"{str(self.target)!r}; got another disk, or another path. Pass a folder that all machines share, "
                    "or ProjectConfiguration(save_on_each_node=True) for a whole checkpoint on each."
                )

    def hooked(self) -> list[str]:
        """Return what is in the hidden folder, on the rank that leads."""
        return list(self.sizes()) if self.leads else []

    def write(self, entries: Sequence[Entry]) -> None:
        """Do nothing: the files lie where they belong."""

    def sizes(self) -> dict[str, int]:
        """Return the files in the hidden folder."""
        return commit.files_in(self.staging)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, rename the hidden folder, and put its files in place.

        Raises:
            CheckpointError: It is not committed, and what was there is intact; or it is, and the error says so.
        """
        manifest.write(self.staging)
        stale = owned_files(self.target) - commit.files_in(self.staging, links=True).keys()
        commit.publish(self.staging, self.target, stale=stale, last=[names.MANIFEST_NAME])

    def abort(self) -> None:
        """Delete the hidden folder, and the target if it was made for it."""
        if self.leads:
            commit.clear(self.staging)
        if self.made:
            with contextlib.suppress(OSError):  # others keep something there by now
                self.target.rmdir()

    def prune(self, limit: int) -> None:
        """Delete the oldest of a numbered series."""
        commit.prune(self.target, limit)

    def newest(self) -> Path:
        """Return the one with the highest number that is complete.

        Raises:
            CheckpointNotFoundError: There is none.
        """
        series = commit.numbered(self.target)
        for target in reversed(series):
            if commit.find(target) is not None:
                return target
        raise CheckpointNotFoundError(
            f"There is no complete checkpoint_<number> in {str(self.target)!r}; got "
            f"{', '.join(each.name for each in series[-_SHOWN:]) or 'no folder of that name'}. Start the run from the "
            "beginning."
        )

    def open(self, ranks: Ranks) -> tuple[Path, Manifest | None]:
        """Read the manifest and the lists that it names on the main rank, and compare with what each rank sees.

        Returns:
            The folder in which the checkpoint is read, and its manifest.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointMismatchError: Ranks see different saves.
            CheckpointDamagedError: The manifest is damaged.
        """
        doing = f"Opening the checkpoint {str(self.target)!r}"
        folder = commit.standing(self.target)
        with ranks.together(doing):
            self.head = Manifest.head(folder)
            manifest = Manifest.read(folder) if ranks.rank == 0 else None
        head, manifest, target = ranks.broadcast((self.head, manifest, str(self.target)))
        with ranks.together(f"Opening the checkpoint {target!r}"):
            own, other = (f"save {each.save}" if each else "no manifest" for each in (self.head, head))
            if own != other:
                raise CheckpointMismatchError(
                    f"The ranks do not hold the same save of the checkpoint, and nothing was changed; got {own} in "
                    f"{str(folder)!r} on rank {ranks.rank}, and {other} on the main rank. Pass the same checkpoint "
                    "on all ranks, or copy it to the disks that lack it."
                )
            if self.head != head:  # saved on each node: this one lists files of its own
                manifest = Manifest.read(folder)
        return folder, manifest

    def fetch(self, wanted: Iterable[str], ranks: Ranks) -> None:
        """Do nothing: the files are here."""

    def is_replaced(self) -> bool:
        """Return whether another manifest stands there now: a save takes the old one away before anything else."""
        try:
            return Manifest.head(commit.standing(self.target)) != self.head
        except (CheckpointError, OSError):
            return True

    def close(self) -> None:
        """Do nothing: nothing was used."""
