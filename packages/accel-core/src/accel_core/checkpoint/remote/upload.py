"""A save to an address, as one rank sees it: staged on this machine, written to the store, committed last."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import commit as folders
from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.manifest import Entry, Manifest
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.remote import commits
from accel_core.checkpoint.remote.commits import Commit
from accel_core.checkpoint.remote.local import LocalFolder
from accel_core.checkpoint.remote.store import PARALLEL, PART, Store
from accel_core.errors import CheckpointError, ConfigurationError
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import World

__all__ = ["Upload", "open_store"]

logger = logging.getLogger(__name__)

_probed: set[str] = set()


@record
class Upload:
    """What the steps of a save do instead, where it goes to a store."""

    world: World
    store: Store
    local: LocalFolder
    number: int  # of its commit
    identity: str
    written_at: int
    run: str
    kept: bool  # whether the staged files stay on this machine, for a later load
    hooked: list[str] = field(default_factory=list)  # what save hooks wrote on this machine
    commit: Commit | None = None  # what `complete` prepared, on rank 0
    asked: bool = False  # whether the store was asked for the commit, so that it may be done

    @classmethod
    def begin(cls, world: World, ranks: Ranks, target: Address, project: ProjectConfiguration) -> Upload:
        """See what stands at the address, and make room on this machine; every rank calls it."""
        doing = f"Preparing the checkpoint {str(target)!r}"
        with ranks.together(doing):
            store = open_store(target, ranks)
            number = _next_number(store, project) if world.is_main else 0
        given = names.fresh_id(), time.time_ns(), number, project.run_id
        identity, written_at, number, project.run_id = ranks.broadcast(given)
        local = LocalFolder.of(project.local_cache, "saving", identity, target.name or target.scheme)
        with ranks.together(doing):
            if world.is_local_main:
                probe(store)
                local.make()
        made = cls(world, store, local, number, identity, written_at, project.run_id, project.local_cache is not None)
        with ranks.together(doing):
            local.files.mkdir(parents=True, exist_ok=True)  # where ranks of one machine do not see the same folder
        return made

    def note_hooked(self) -> list[str]:
        """Note what save hooks wrote; the files count as those of the first rank of this machine."""
        self.hooked = folders.files_in(self.local.files) if self.world.is_local_main else []
        return []

    def send(self, entries: Sequence[Entry]) -> None:
        """Write files to the store: large ones in parts that go together, small ones together; two parts in memory."""
        folder = commits.folder_name(self.number, self.identity)
        large = [each for each in entries if each.size > PART]
        small = [each for each in entries if each.size <= PART]

        def put(each: Entry) -> None:
            try:
                self.store.put(self.local.files / each.name, f"{folder}/{each.name}")
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"A file that was staged for {str(self.store.address)!r} is gone; got {error}. Leave the folder "
                    f"{str(self.local.root)!r} alone while a save is under way."
                ) from error
            if not self.kept:  # so that no more room is taken than for what is still to be written
                (self.local.files / each.name).unlink(missing_ok=True)

        with self.store.traffic.watched(f"Writing {self.store.address}", sum(each.size for each in entries)):
            for each in large:
                put(each)
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="accel-upload") as pool:
                for _ in pool.map(put, small):
                    pass

    def found(self, entries: Sequence[Entry]) -> dict[str, int]:
        """Return the files that the store has whole, with sizes, after writing those that were concluded on rank 0."""
        if len({entry.name for entry in entries}) < len(entries):
            raise CheckpointError(
                "Hooks of several machines write files of one name, and a checkpoint at an address has one of each; "
                f"got {sorted(entry.name for entry in entries)}. Put the rank into the name."
            )
        if commits.is_taken(self.store, self.number):
            raise self._refused()
        folder = commits.folder_name(self.number, self.identity)
        stored = self.store.sizes(folder)
        left = [each for each in entries if each.name not in stored and (self.local.files / each.name).is_file()]
        self.send(left)
        stored |= {each.name: each.size for each in left}
        for each in entries:
            # A store may list an object late that it knows by its name at once.
            size = stored[each.name] if each.name in stored else self.store.size(f"{folder}/{each.name}")
            if size is not None and size != each.size:
                raise CheckpointError(
                    f"The store has another size of {each.name} at {str(self.store.address)!r}; got {size} bytes "
                    f"instead of {each.size}. Save again; if several hooks write a file of that name, rename it."
                )
            stored |= {} if size is None else {each.name: size}
        return stored

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, after which nothing but the commit is missing."""
        raw = manifest.encode()
        manifest.write(self.local.files)
        folder = commits.folder_name(self.number, self.identity)
        self.store.put(self.local.files / names.MANIFEST_NAME, f"{folder}/{names.MANIFEST_NAME}")
        self.commit = Commit(self.number, self.identity, digest_of_bytes(raw), self.run)

    def publish(self) -> None:
        """Commit: from then on it is the checkpoint."""
        if self.commit is None:
            raise AssertionError("a save is committed after it was completed")
        self.asked = True
        if not self.store.create(self.commit.name, self.commit.encode()):
            self.asked = False
            raise self._refused()
        try:
            commits.clear(self.store, self.commit)
        except (CheckpointError, ConfigurationError) as error:
            logger.warning("The checkpoint %s is complete. %s", self.store.address, _KEPT % error)

    def prune(self, limit: int) -> None:
        """Delete the oldest of a numbered series, so that `limit` remain; never this one."""
        series, kept = Store(Address(self.store.address.parent), self.store.traffic), 0
        try:
            for number in reversed(commits.numbered(series)):
                place = series.below(f"checkpoint_{number}")
                if kept >= max(1, limit) and place.address != self.store.address:
                    commits.remove(place)
                elif commits.newest(place) is not None:  # what a crash left of a save does not count
                    kept += 1
        except (CheckpointError, ConfigurationError) as error:
            logger.warning("The checkpoint %s is complete. %s", self.store.address, _KEPT % error)

    def leave(self, *, committed: bool) -> None:
        """Give back the room on this machine; every rank calls it, when all have written."""
        if self.world.is_main:
            logger.info("Saved %s: %s", self.store.address, self.store.traffic)
        if self.world.is_local_main and self.kept and committed:
            self.local.keep_near(self.identity)
        elif not (self.kept and committed):
            self.local.leave()

    def abandon(self) -> None:
        """Delete what was written, unless the commit was asked for: it may have been done."""
        if self.world.is_main and not self.asked:
            try:
                self.store.delete_folder(commits.folder_name(self.number, self.identity))
            except (CheckpointError, ConfigurationError) as error:
                logger.warning("The save to %s failed. %s", self.store.address, _KEPT % error)
        self.leave(committed=False)

    def _refused(self) -> CheckpointError:
        return CheckpointError(
            f"Another writer saved to {str(self.store.address)!r} since this save began; got its commit number "
            f"{self.number}. Its checkpoint is whole and stands, and this one was not committed. Let one run at a time "
            "save to an address."
        )


_KEPT = "What is of no use there could not be deleted: %s The next save tries again."


def open_store(place: Path, ranks: Ranks) -> Store:
    """Return the place of a checkpoint, which all ranks reach."""
    address = Address(place)
    if address.scheme == "memory" and ranks.size > 1:
        raise ConfigurationError(
            f"memory:// is the memory of one process; got {str(address)!r} on {ranks.size} processes. Use a folder "
            "that all of them see, or a store."
        )
    return Store(address)


def probe(store: Store) -> None:
    """Make sure that checkpoints can be written and deleted at an address; once for those in one folder."""
    place = str(store.address.parent)
    if place not in _probed:
        store.probe()
        _probed.add(place)


def _next_number(store: Store, project: ProjectConfiguration) -> int:
    """Return the number of the next commit at an address where this run may save."""
    stands = commits.newest(store)
    if stands is None:
        return 1
    where = repr(str(store.address))
    if project.automatic_checkpoint_naming:
        raise ConfigurationError(
            f"The checkpoint {where} exists already, and automatic naming would overwrite it. Load it first, which "
            "sets the number of the next one, or set project_configuration.iteration."
        )
    if stands.run != project.run_id:
        raise ConfigurationError(
            f"The checkpoint at {where} is of another run; got one that run {stands.run} saved, and this is run "
            f"{project.run_id}. Load it first if this run goes on from it, delete it, or save to another address."
        )
    return stands.number + 1
