"""One save: where it is written, who writes, and how it becomes the checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import commit, disposal, names
from accel_core.checkpoint.digest import digest_of, flush_folder
from accel_core.checkpoint.format import Part
from accel_core.checkpoint.manifest import Entry, Manifest, versions
from accel_core.checkpoint.ranks import Ranks
from accel_core.process.world import World

__all__ = ["Transaction"]

_KEEPER = ".keeper"
_WRITERS = 4


@record(frozen=True)
class Transaction:
    """One save, as one rank sees it.

    Attributes:
        target: Where the checkpoint goes.
        staging: Where it is written.
        identity: Id of the save.
        rank: This rank.
        size: Number of ranks.
        keeper: The rank that completes the folder on the disk that this rank sees.
        writes_shared: Whether this rank writes what all ranks of its disk share.
        limit: Number of numbered checkpoints to keep, `None` for all.
        numbered: Whether the target is one of a numbered series.
    """

    target: Path
    staging: Path
    identity: str
    rank: int
    size: int
    keeper: int
    writes_shared: bool
    limit: int | None
    numbered: bool

    @classmethod
    def begin(
        cls,
        world: World,
        ranks: Ranks,
        choose: Callable[[], Path],
        *,
        each_node: bool,
        limit: int | None,
        numbered: bool,
    ) -> Transaction:
        """Settle what earlier saves left, and make the folder to write into; every rank calls it.

        Args:
            world: This process among its fellows.
            ranks: The ranks that save together.
            choose: Returns where the checkpoint goes.
            each_node: Whether the first rank of every machine writes what is shared, if it has a disk of its own.
            limit: Number of numbered checkpoints to keep, `None` for all.
            numbered: Whether the target is one of a numbered series.

        Raises:
            CheckpointError: Some rank could not; every rank raises the same.
        """
        failure: Exception | None = None
        target = Path()
        identity = names.fresh_id()
        try:
            target = Path(os.path.realpath(choose()))
            if world.is_main:
                _make_room(target, identity, world.rank, numbered)
        except Exception as error:
            failure = error
        ranks.agree(failure, f"Preparing the checkpoint {str(target)!r}")
        identity = ranks.exchange(identity)[0]
        staging = commit.staging_of(target, identity)
        keeper = 0
        if world.local_size < world.size:
            keeper = cls._find_keeper(world, ranks, target, staging, identity, numbered)
        writes_shared = world.is_main or (each_node and keeper == world.rank)
        return cls(target, staging, identity, world.rank, world.size, keeper, writes_shared, limit, numbered)

    @staticmethod
    def _find_keeper(world: World, ranks: Ranks, target: Path, staging: Path, identity: str, numbered: bool) -> int:
        """Give every disk a keeper: the main rank, and the first rank of each machine that does not see its folder."""
        failure: Exception | None = None
        try:
            if world.is_local_main and not (staging / _KEEPER).exists():
                _make_room(target, identity, world.rank, numbered)
        except Exception as error:
            failure = error
        ranks.agree(failure, f"Preparing the checkpoint {str(target)!r}")
        return int((staging / _KEEPER).read_text())

    def finish(self, parts: Sequence[Part], failure: Exception | None, ranks: Ranks, *, threads: bool = False) -> Path:
        """Write, agree, complete and put in place; every rank calls it and leaves when all is done.

        Args:
            parts: What this rank writes.
            failure: What already went wrong on this rank.
            ranks: The ranks that save together.
            threads: Write files at the same time, so that they wait for the disk together. A process that is about
                to exit cannot start threads.

        Raises:
            CheckpointError: Some rank failed; every rank raises the same, and the target is as it was.
        """
        entries: list[Entry] = []
        inside = self._working_folder()
        if failure is None:
            try:
                entries = self._write(parts, threads)
            except Exception as error:
                failure = error
        try:
            everybody = ranks.exchange((self.keeper, entries))
            ranks.agree(failure, f"Writing the checkpoint {str(self.target)!r}")
        except BaseException:
            self._undo()
            raise
        mine = [entry for keeper, written in everybody if keeper == self.rank for entry in written]
        try:
            if self.keeper == self.rank:
                self._complete(mine)
        except Exception as error:
            self._undo()
            failure = error
        ranks.agree(failure, f"Completing the checkpoint {str(self.target)!r}")
        self._return_to(inside)
        return self.target

    def _write(self, parts: Sequence[Part], threads: bool) -> list[Entry]:
        together = [part for part in parts if threads and part.concurrent]
        entries: list[Entry] = []
        if together:
            with ThreadPoolExecutor(max_workers=_WRITERS, thread_name_prefix="accel-checkpoint") as pool:
                for written in pool.map(lambda part: part.write(self.staging, self.rank), together):
                    entries += written
        for part in parts:
            if not (threads and part.concurrent):
                entries += part.write(self.staging, self.rank)
        return entries

    def _complete(self, entries: list[Entry]) -> None:
        (self.staging / _KEEPER).unlink()
        known = {entry.name for entry in entries}
        for place, _, files in os.walk(self.staging):
            for path in (Path(place) / name for name in files):
                relative = path.relative_to(self.staging).as_posix()
                if relative not in known and not path.is_symlink():
                    entries.append(_entry_of_hook(path, relative, self.rank))
        if self.staging.parent != self.target:
            commit.take_over_foreign_files(self.target, self.staging)
        manifest = Manifest(tuple(sorted(entries, key=lambda entry: entry.name)), self.size, versions())
        manifest.write(self.staging)
        for place, _, _ in os.walk(self.staging, topdown=False):
            flush_folder(Path(place))
        commit.put_in_place(self.staging, self.target, self.identity)
        if self.limit is not None:
            commit.prune(self.target, self.limit)

    def _working_folder(self) -> str | None:
        """Return this process's working folder if it lies in the target, which is about to become another folder."""
        try:
            here = os.getcwd()
        except FileNotFoundError:
            return None
        return here if Path(here).is_relative_to(self.target) else None

    def _return_to(self, folder: str | None) -> None:
        if folder is not None:
            os.chdir(folder)

    def _undo(self) -> None:
        """Delete what was written; what cannot be deleted now is a leftover for the next save."""
        if self.keeper == self.rank:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.staging)


def _make_room(target: Path, identity: str, rank: int, numbered: bool) -> None:
    for other in commit.numbered(target.parent) if numbered else []:
        commit.settle(other)
    commit.settle(target)
    disposal.wait()
    staging = commit.stage(target, identity)
    (staging / _KEEPER).write_text(str(rank))


def _entry_of_hook(path: Path, relative: str, rank: int) -> Entry:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.fsync(descriptor)
    size = os.fstat(descriptor).st_size
    return Entry(relative, size, digest_of(path, lambda _: descriptor), rank)
