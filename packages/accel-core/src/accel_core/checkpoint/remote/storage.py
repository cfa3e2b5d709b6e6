"""Checkpoints at an address: staged on this machine, written to the store, committed by one small object."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import commit, names
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.manifest import Entry, Manifest
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.remote import commits
from accel_core.checkpoint.remote.commits import Commit
from accel_core.checkpoint.remote.scratch import Scratch
from accel_core.checkpoint.remote.store import Store
from accel_core.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from accel_core.process.world import World

logger = logging.getLogger(__name__)

_SHOWN = 10
_KEPT = "The checkpoint %s is complete. What is of no use there could not be deleted: %s The next save tries again."

_probed: set[str] = set()


@record
class RemoteStorage:
    """A checkpoint at an address, as one rank sees it; the main rank leads."""

    world: World
    target: Address
    staging: Path = Path()
    commit_: Commit | None = None  # which is made, or loaded
    scratch: Scratch | None = None
    asked: bool = False  # whether the store was asked for the commit, so that it may be done

    def __post_init__(self) -> None:
        """Open the store.

        Raises:
            ConfigurationError: There is no such store, or this process alone can reach it.
            MissingDependencyError: Its library is not installed.
        """
        if self.target.scheme == "memory" and self.world.size > 1:
            raise ConfigurationError(
                f"memory:// is the memory of one process; got {str(self.target)!r} on {self.world.size} processes. Use "
                "a folder that all of them see, or a store."
            )
        self.store = Store(self.target)

    @property
    def leads(self) -> bool:
        """Whether this is the main rank."""
        return self.world.is_main

    def begin(self, ranks: Ranks, identity: str, *, numbered: bool) -> None:
        """See what stands at the address, and make room on this machine."""
        doing = f"Preparing the checkpoint {str(self.target)!r}"
        with ranks.together(doing):
            stands = commits.newest(self.store) if self.world.is_main else None
            if stands is not None and numbered:
                raise commit.taken(self.target)
            number = 1 if stands is None else stands.number + 1
        self.commit_ = Commit(ranks.broadcast(number), identity, "")
        self._make_room(ranks, identity, doing, writes=True)

    def hooked(self) -> list[str]:
        """Return what is in the folder of this machine, on its first rank."""
        return list(commit.files_in(self.staging)) if self.world.is_local_main else []

    def write(self, entries: Sequence[Entry]) -> None:
        """Write files to the store."""
        self.store.put_all({self.staging / each.name: f"{self._folder}/{each.name}" for each in entries})

    def sizes(self) -> dict[str, int]:
        """Return the objects of this save."""
        return self.store.sizes(self._folder)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and then the commit, where no other save has made it."""
        assert self.commit_ is not None
        manifest.write(self.staging)
        self.store.put(self.staging / names.MANIFEST_NAME, f"{self._folder}/{names.MANIFEST_NAME}")
        made = Commit(self.commit_.number, self.commit_.save, digest_of_bytes(manifest.encode()))
        self.asked = True
        if not self.store.create(made.name, made.encode()):
            self.asked = False
            raise CheckpointError(
                f"Another writer saved to {str(self.target)!r} since this save began; got its commit number "
                f"{made.number}. Its checkpoint is whole and stands, and this one was not committed. Let one run at a "
                "time save to an address."
            )
        try:
            commits.clear(self.store, made)
        except (CheckpointError, ConfigurationError) as error:
            logger.warning(_KEPT, self.target, error)

    def abort(self) -> None:
        """Delete what was written, unless the commit was asked for: it may have been done."""
        if self.world.is_main and self.commit_ is not None and not self.asked:
            try:
                self.store.delete_folder(self._folder)
            except (CheckpointError, ConfigurationError) as error:
                logger.warning("The save to %s failed, and left files there: %s", self.target, error)
        self.close()

    def prune(self, limit: int) -> None:
        """Delete the oldest of a numbered series; what a crash left of a save does not count."""
        series, kept = Store(Address(self.target.parent)), 0
        try:
            for number in reversed(commits.numbered(series)):
                place = series.below(f"checkpoint_{number}")
                if kept >= max(1, limit) and place.address != self.target:
                    commits.clear(place)
                elif commits.newest(place) is not None:
                    kept += 1
        except (CheckpointError, ConfigurationError) as error:
            logger.warning(_KEPT, self.target, error)

    def newest(self) -> Path:
        """Return the one with the highest number of which every file is there."""
        seen = []
        for number in reversed(commits.numbered(self.store)):
            place = self.store.below(f"checkpoint_{number}")
            found = commits.newest(place)
            problem = "was not committed" if found is None else _missing(place, found)
            if not problem:
                return place.address
            seen.append(f"checkpoint_{number}: {problem}")
            logger.warning("The checkpoint %s is not complete and left out: %s", place.address, problem)
        raise CheckpointNotFoundError(
            f"There is no complete checkpoint_<number> at {str(self.target)!r}; got {'; '.join(seen) or 'none'}. Start "
            "the run from the beginning."
        )

    def open(self, ranks: Ranks) -> tuple[Path, Manifest | None]:
        """Read which save counts, and its manifest, on the main rank."""
        doing = f"Opening the checkpoint {str(self.target)!r}"
        found: tuple[Commit, Manifest] | None = None
        with ranks.together(doing):
            stands = commits.newest(self.store) if ranks.rank == 0 else None
            if ranks.rank == 0:
                if stands is None:
                    there = self.store.children()[:_SHOWN] or "nothing"
                    raise CheckpointNotFoundError(
                        f"There is no complete checkpoint at {str(self.target)!r}; got {there} there. Pass an address "
                        "that save_state wrote to."
                    )
                found = stands, commits.read_manifest(self.store, stands)
        known = ranks.broadcast(found)
        assert known is not None
        self.commit_, manifest = known
        self._make_room(ranks, ranks.broadcast(names.fresh_id()), doing, writes=False)
        return self.staging, manifest

    def fetch(self, wanted: Iterable[str], ranks: Ranks) -> None:
        """Bring files to this machine, each by one of its ranks."""
        with ranks.together(f"Reading the checkpoint {str(self.target)!r}"):
            mine = sorted(wanted)[self.world.local_rank :: max(1, self.world.local_size)]
            self.store.get_all({f"{self._folder}/{name}": self.staging / name for name in mine})

    def is_replaced(self) -> bool:
        """Return false: every save has a folder of its own, whose files no other one changes."""
        return False

    def close(self) -> None:
        """Delete the folder of this machine."""
        if self.scratch is not None:
            self.scratch.leave()

    @property
    def _folder(self) -> str:
        assert self.commit_ is not None
        return self.commit_.folder

    def _make_room(self, ranks: Ranks, identity: str, doing: str, *, writes: bool) -> None:
        scratch = Scratch.of(identity)
        self.staging = scratch.folder / (self.target.name or self.target.scheme)
        with ranks.together(doing):
            if self.world.is_local_main:
                if writes:
                    probe(self.store)
                scratch.make()
                self.staging.mkdir()
                self.scratch = scratch


def probe(store: Store) -> None:
    """Make sure that checkpoints can be written and deleted at an address; once for those in one folder."""
    place = str(store.address.parent)
    if place not in _probed:
        store.probe()
        _probed.add(place)


def _missing(store: Store, commit: Commit) -> str:
    """Say what is missing of a save that was committed: somebody deleted it since. An empty text for nothing."""
    try:
        manifest = commits.read_manifest(store, commit)
    except CheckpointError as error:
        return str(error)
    stored = store.sizes(commit.folder)
    unlike = [each.name for each in manifest.entries if stored.get(each.name) != each.size]
    unlike += list(manifest.lost)
    return f"{unlike[:_SHOWN]} are missing, or not of their size" if unlike else ""
