"""One save: where it is written, who writes, and how it becomes the checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import commit, deferred_delete, names
from accel_core.checkpoint.agreement import common_save, together
from accel_core.checkpoint.digest import digest_of
from accel_core.checkpoint.format import Part, SharedPart
from accel_core.checkpoint.manifest import Entry, Manifest, versions
from accel_core.checkpoint.ranks import Ranks
from accel_core.errors import CheckpointError, ConfigurationError, RemoteRankError
from accel_core.process.world import World

__all__ = ["Transaction"]

_KEEPER = ".keeper"
_WRITERS = 4
_SHOWN = 10
_AFTER_COMMIT = "What each rank says of its disk holds; load_state takes the newest save that every rank holds."


@record(frozen=True)
class Transaction:
    """One save, as one rank sees it.

    Attributes:
        target: Where the checkpoint goes.
        staging: Where it is written.
        identity: Id of the save.
        written_at: When it began on the main rank, in nanoseconds since the epoch; the same on all ranks.
        rank: This rank.
        size: Number of ranks.
        keeper: The rank that completes the folder on the disk that this rank sees.
        writes_shared: Whether this rank writes what all ranks of its disk share.
        limit: Number of numbered checkpoints to keep, `None` for all.
        absent: Number of ranks of the run that it is made without.
    """

    target: Path
    staging: Path
    identity: str
    written_at: int
    rank: int
    size: int
    keeper: int
    writes_shared: bool
    limit: int | None
    absent: int = 0

    @classmethod
    def begin(
        cls,
        world: World,
        ranks: Ranks,
        target: Path,
        *,
        each_node: bool,
        limit: int | None,
        numbered: bool,
        absent: int = 0,
    ) -> Transaction:
        """Settle what earlier saves left, and make the folder to write into; every rank calls it.

        Raises:
            CheckpointError: Some rank could not; every rank raises the same.
        """
        doing = f"Preparing the checkpoint {str(target)!r}"
        identity, written_at = ranks.exchange((names.fresh_id(), time.time_ns()))[0]
        several_disks = world.local_size < world.size
        kept = _common_saves(target, ranks, numbered) if several_disks else {}
        # What a crash left of other checkpoints on several disks is decided on all of them, not by one rank alone.
        others = numbered and absent < world.local_size
        with together(ranks, doing):
            if world.is_main:
                _make_room(target, identity, world.rank, numbered, kept, others=others)
        if several_disks:
            # Only now can the first rank of a machine see whether its disk is the main rank's.
            with together(ranks, doing):
                if world.is_local_main and _keeper_of(target, identity) is None:
                    _make_room(target, identity, world.rank, numbered, kept, others=others)
        staging, keeper = Path(), 0
        with together(ranks, doing):
            staging, keeper = _found(target, identity)
        return cls(
            target,
            staging,
            identity,
            written_at,
            world.rank,
            world.size,
            keeper,
            writes_shared=world.is_main or (each_node and keeper == world.rank),
            limit=limit,
            absent=absent,
        )

    def written_by_hooks(self) -> list[str]:
        """Return the names of the files that save hooks wrote; on other ranks than the keeper, none."""
        return [name for name in _files_below(self.staging) if name != _KEEPER] if self.keeper == self.rank else []

    def finish(self, parts: Sequence[Part], hooked: Sequence[str], ranks: Ranks, *, threads: bool = False) -> Path:
        """Write, agree, complete and put in place; every rank calls it and leaves when all is done.

        Raises:
            CheckpointError: Some rank failed; every rank raises the same, and it says which checkpoint stands.
        """
        try:
            entries: list[Entry] = []
            with together(ranks, f"Writing the checkpoint {str(self.target)!r}"):
                entries = self._write(parts, threads)
            shared = [part for part in parts if isinstance(part, SharedPart)]
            everybody = ranks.exchange((self.keeper, entries, {part.name: part.note for part in shared}))
            mine = [entry for keeper, written, _ in everybody if keeper == self.rank for entry in written]
            with together(ranks, f"Completing the checkpoint {str(self.target)!r}"):
                if self.keeper == self.rank:
                    for part in shared:
                        notes = [noted.get(part.name) for _, _, noted in everybody]
                        mine += part.conclude(self.staging, self.rank, notes)
                    self._complete(mine, hooked)
        except BaseException:
            self.abandon()
            raise
        self._publish(ranks, alone=len({keeper for keeper, *_ in everybody}) == 1)
        if self.limit is not None:
            if self.keeper == self.rank:
                commit.prune(self.target, self.limit)
            ranks.exchange(None)
        return self.target

    def abandon(self) -> None:
        """Delete what was written; what cannot be deleted now is a leftover for the next save."""
        if self.keeper == self.rank:
            commit.undo(self.staging, self.target)

    def _write(self, parts: Sequence[Part], threads: bool) -> list[Entry]:
        concurrent = [part for part in parts if threads and part.concurrent]
        entries: list[Entry] = []
        if concurrent:
            with ThreadPoolExecutor(max_workers=_WRITERS, thread_name_prefix="accel-checkpoint") as pool:
                for written in pool.map(lambda part: part.write(self.staging, self.rank), concurrent):
                    entries += written
        for part in parts:
            if not (threads and part.concurrent):
                entries += part.write(self.staging, self.rank)
        return entries

    def _complete(self, entries: list[Entry], hooked: Sequence[str]) -> None:
        (self.staging / _KEEPER).unlink()
        entries += [_entry_of_hook(self.staging / name, name, self.rank) for name in hooked]
        listed, found = {entry.name for entry in entries}, set(_files_below(self.staging))
        if listed != found:
            raise CheckpointError(
                f"The parts of a checkpoint have to list what they write; got {sorted(found - listed)[:_SHOWN]} that "
                f"no part lists, and {sorted(listed - found)[:_SHOWN]} that none wrote. Return an Entry for every "
                "file from Part.write."
            )
        ordered = tuple(sorted(entries, key=lambda entry: entry.name))
        manifest = Manifest(ordered, self.size, versions(), self.written_at, self.identity, self.absent)
        commit.complete(self.staging, self.target, manifest)

    def _publish(self, ranks: Ranks, *, alone: bool) -> None:
        """Commit on every disk. All of them are prepared, so what one disk commits, every disk can be given."""
        try:
            with together(ranks, f"Putting the checkpoint {str(self.target)!r} in place", _AFTER_COMMIT):
                if self.keeper == self.rank:
                    commit.publish(self.staging, self.target)
        except RemoteRankError as error:
            raise RemoteRankError(
                f"Rank {self.rank} lost another rank while the checkpoint {str(self.target)!r} was put in place, which "
                f"may or may not have been done; got {error.__cause__ or error}. Start the run again: load_state "
                "takes the newest save that every rank holds."
            ) from error
        except CheckpointError:
            # Where several disks commit, another may have: then what is prepared here is what this disk is brought
            # up to date from.
            if alone and self.keeper == self.rank and self.staging.is_dir():
                self.abandon()
            raise


def _make_room(target: Path, identity: str, rank: int, numbered: bool, kept: dict[str, str], *, others: bool) -> None:
    for other in commit.unsettled(target.parent) if others else []:
        commit.settle(other, kept.get(other.name))
    commit.settle(target, kept.get(target.name))
    if numbered and commit.find(target) is not None:
        raise ConfigurationError(
            f"The checkpoint {str(target)!r} exists already, and automatic naming would overwrite it. Load it "
            "first, which sets the number of the next one, or set project_configuration.iteration."
        )
    deferred_delete.wait()
    staging = commit.stage(target, identity)
    (staging / _KEEPER).write_text(str(rank))


def _found(target: Path, identity: str) -> tuple[Path, int]:
    """Return the folder that was made for a save on the disk that this rank sees, and which rank completes it."""
    staging, keeper = commit.staging_of(target, identity), _keeper_of(target, identity)
    if staging is None or keeper is None:
        raise CheckpointError(
            f"The folder that the main process made for a save is not to be seen beside or in {str(target)!r}; got "
            "none. Pass the same folder on all ranks of a machine."
        )
    return staging, keeper


def _keeper_of(target: Path, identity: str) -> int | None:
    staging = commit.staging_of(target, identity)
    try:
        return None if staging is None else int((staging / _KEEPER).read_text())
    except FileNotFoundError:
        return None


def _common_saves(target: Path, ranks: Ranks, numbered: bool) -> dict[str, str]:
    """Return which save all disks hold of each target that a crash left several of; no id where there is none."""
    unsettled = {other.name for other in commit.unsettled(target.parent)} if numbered else set()
    looked_at = sorted(set().union({target.name}, *ranks.exchange(unsettled)))
    own = [commit.holdings(target.with_name(name)) for name in looked_at]
    everywhere = ranks.exchange(own)
    return {name: common_save(held) or "" for name, held in zip(looked_at, zip(*everywhere, strict=True), strict=True)}


def _files_below(folder: Path) -> list[str]:
    """Return the files in a folder and in all folders in it, but no links."""
    paths = (Path(place) / name for place, _, files in os.walk(folder) for name in files)
    return [path.relative_to(folder).as_posix() for path in paths if not path.is_symlink()]


def _entry_of_hook(path: Path, relative: str, rank: int) -> Entry:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.fsync(descriptor)
    size = os.fstat(descriptor).st_size
    return Entry(relative, size, digest_of(path, lambda _: descriptor), rank)
