"""A load from an address: which save it is, and its bytes on this machine, each fetched once by one of its ranks."""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import cast

from accel_core._records import record
from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.digest import digest_of
from accel_core.checkpoint.manifest import Manifest, damaged_file, total_of
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.remote import commits
from accel_core.checkpoint.remote.commits import Commit
from accel_core.checkpoint.remote.local import LocalFolder
from accel_core.checkpoint.remote.store import PARALLEL, PART, Store
from accel_core.checkpoint.remote.upload import open_store
from accel_core.checkpoint.window import Window
from accel_core.errors import AccelError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from accel_core.process.world import World

__all__ = ["Download", "StoredFile", "fetch", "make_hole", "parts_of", "read_part"]

logger = logging.getLogger(__name__)

Pieces = Mapping[str, Sequence[tuple[int, int]]]
"""First byte, and that after the last, of values in each of some shards: what `torch.save` wrote of one."""

_MISSING = "missing.json"
_SHOWN = 10


@record
class Download:
    """A checkpoint of a store as it lies on this machine: files that were not fetched are holes of their size."""

    world: World
    store: Store
    commit: Commit
    local: LocalFolder
    cached: bool
    missing: dict[str, int] = field(default_factory=dict)  # sizes of what is not here yet, as its first rank knows
    partial: set[str] = field(default_factory=set)  # shards of which some pieces are here, or none

    @classmethod
    def begin(cls, world: World, ranks: Ranks, given: Address, cache: str | None, *, series: bool) -> Download:
        """Agree on a save, the newest whole one of a `series`, and lay out its files here; every rank calls it."""
        doing = f"Opening the checkpoint {str(given)!r}"
        with ranks.together(doing):
            store = open_store(given, ranks)
            chosen = _choose(store, series) if world.is_main else None
        address, commit = cast(tuple[str, Commit], ranks.broadcast(chosen))  # the main rank chose one, or raised
        place = Store(Address(address), store.traffic)
        identity = commit.save if cache is not None else names.fresh_id()
        local = LocalFolder.of(cache, "loading", ranks.broadcast(identity), place.address.name or given.scheme)
        made = cls(world, place, commit, local, cache is not None)
        try:
            with ranks.together(doing):
                if world.is_local_main:
                    # Two runs that fetch into one cache would put holes in the place of what the other one has.
                    local.make(alone=made.cached)
                    made._begin()
            if made.cached:
                made.use(ranks.exchange(local.root.name if world.is_local_main else ""))
        except BaseException:
            made.close()
            raise
        return made

    def use(self, folders: Sequence[str]) -> None:
        """Use the folder of this machine, of those that ranks made; where another run has the cache, it is none."""
        world, root = self.world, self.local.root
        self.local.root = root.with_name(folders[(world.rank - world.local_rank) % len(folders)] or root.name)
        self.cached = self.local.root.name.startswith("near-")

    def fetch(self, wanted: set[str], ranks: Ranks, pieces: Callable[[], Pieces] | None = None) -> None:
        """Fetch files in parts, of which each rank of this machine takes its share; every rank calls it.

        Of shards, `pieces` returns those that this rank reads, and is asked when all other files are here. A shard that
        the ranks of this machine read a part of is fetched so far, and has the rest as a hole.
        """
        doing = f"Reading the checkpoint {str(self.store.address)!r}"
        with ranks.together(doing):
            missing = json.loads((self.local.root / _MISSING).read_bytes())
            shards = {name for name in wanted & missing.keys() if pieces and name.endswith(names.SHARD_SUFFIX)}
            self._take((name, 0, missing[name]) for name in sorted(wanted & missing.keys() - shards))
            if self.world.is_local_main:
                for name in missing.keys() - wanted:  # a hole is not to be taken for zeros
                    (self.local.files / name).unlink()
        if pieces is None:
            return
        told = [self.local.root / f"pieces-{rank}.json" for rank in range(max(1, self.world.local_size))]
        with ranks.together(doing):
            mine = {name: found for name, found in pieces().items() if name in shards}
            told[self.world.local_rank].write_text(json.dumps(mine))
        with ranks.together(doing):
            read = [json.loads(path.read_bytes()) for path in told]
            known = {os.path.dirname(name) for each in read for name in each}
            ranges = {name: _joined(piece for each in read for piece in each.get(name, ())) for name in shards}
            ranges |= {name: [(0, missing[name])] for name in shards if os.path.dirname(name) not in known}
            self.partial = {name for name in shards if ranges[name] != [(0, missing[name])]}
            self._take((name, *piece) for name in sorted(shards) for piece in ranges[name])
        with ranks.together(doing):  # digests are of whole files
            for name in self.partial & mine.keys():
                for start, stop in mine[name]:
                    _check_archive(self.local.files / name, start, stop)

    def _take(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Fetch this rank's share of what its machine needs."""
        mine = parts_of(ranges, self.world.local_rank, max(1, self.world.local_size))
        with self.local.room():
            fetch(self.store, self.commit.folder, mine, self.local.files)

    def close(self) -> None:
        """Give back the room on this machine, but for the cache; every rank calls it when all have loaded."""
        if self.world.is_local_main:
            self.local.keep_near(self.commit.save) if self.cached else self.local.leave()

    def is_old(self) -> bool:
        """Return whether another save counts at the address by now."""
        try:
            return commits.newest(self.store) != self.commit
        except AccelError:  # other ranks wait for the answer, and the error that is asked about says more
            return False

    def lay_out(self, manifest: Manifest) -> None:
        """Make a hole of its size for every file that is not here already; the first rank of a machine calls it."""
        for entry in manifest.entries:
            path = self.local.files / entry.name
            here = path.is_file() and path.stat().st_size == entry.size
            if entry.name not in self.missing and not (here and digest_of(path) == entry.digest):  # in the cache
                self.missing[entry.name] = entry.size
                make_hole(path, entry.size)
        (self.local.root / _MISSING).write_text(json.dumps(self.missing))

    def _begin(self) -> None:
        """Write the manifest, and the lists of what the ranks of this machine read, and make room for the files."""
        raw, head = _manifest_of(self.store, self.commit)
        first = self.world.rank  # of this machine
        shares = [(rank, self.world.size) for rank in range(first, first + max(1, self.world.local_size))]
        (self.local.files / names.MANIFEST_NAME).write_bytes(raw)
        self.lay_out(commits.with_lists(self.store, self.commit, head, head.listing(shares), self.local.files))


def fetch(store: Store, folder: str, parts: Sequence[tuple[str, int, int]], into: Path) -> None:
    """Fetch parts of files into their places in files that exist; two parts are in memory at most."""

    def one(part: tuple[str, int, int]) -> None:
        name, start, stop = part
        content = read_part(store, f"{folder}/{name}" if folder else name, start, stop)
        with open(into / name, "r+b", buffering=0) as file:  # a hole was made for it
            file.seek(start)
            view = memoryview(content)
            while len(view):
                view = view[file.write(view) or 0 :]

    total = sum(stop - start for _, start, stop in parts)
    with store.traffic.watched(f"Reading {store.address}", total), ThreadPoolExecutor(PARALLEL) as pool:
        for _ in pool.map(one, parts):
            pass


def read_part(store: Store, name: str, start: int, stop: int) -> bytes:
    """Return bytes of a file that the store listed."""
    try:
        return store.read(name, start, stop)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"A file of the checkpoint {str(store.address)!r} is not in the store; got no {name}, which was listed "
            "there. Load another checkpoint."
        ) from error


@record(frozen=True)
class StoredFile:
    """A file that stays in a store and is read by ranges, as it was when it was opened."""

    store: Store
    name: str
    size: int
    state: tuple[int, str] | None = None  # another one when another file takes its name; `None` where none can

    def read(self, start: int, stop: int, take: Callable[[int, bytes], object]) -> None:
        """Read bytes in parts, two at a time, and give each to `take` with its place after `start`.

        Raises:
            CheckpointError: The store fails for good, or the file is gone or another one.
        """

        def one(part: tuple[str, int, int]) -> None:
            name, low, high = part
            take(low - start, read_part(self.store, name, low, high))

        watched = self.store.traffic.watched(f"Reading {self.store.address}", stop - start, last=False)
        with watched, ThreadPoolExecutor(PARALLEL) as pool:
            for _ in pool.map(one, parts_of([(self.name, start, stop)])):
                pass
        if self.state is not None and self.store.state(self.name) != self.state:
            raise CheckpointError(
                f"The weights at {str(self.store.address)!r} were replaced while they were in use; got another "
                f"{self.name}. Load them again."
            )


def parts_of(ranges: Iterable[tuple[str, int, int]], rank: int = 0, ranks: int = 1) -> list[tuple[str, int, int]]:
    """Return what of some ranges of files one of several ranks fetches, all about as many bytes, in parts.

    >>> parts_of([("a", 0, 5), ("b", 2, 5)], 1, 2)
    [('a', 4, 5), ('b', 2, 5)]
    """
    wanted = list(ranges)
    total = sum(stop - start for _, start, stop in wanted)
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    parts, begin = [], 0  # `begin` is where a range begins, if all lay one after the other
    for name, low, high in wanted:
        start, stop = low + max(first - begin, 0), low + min(last - begin, high - low)
        parts += [(name, at, min(at + PART, stop)) for at in range(start, stop, PART)]
        begin += high - low
    return parts


def _joined(pieces: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Return pieces of a file in order, with those that touch or overlap as one.

    >>> _joined([(4, 6), (0, 2), (2, 3)])
    [(0, 3), (4, 6)]
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(map(tuple, pieces)):
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return found


def _check_archive(path: Path, start: int, stop: int) -> None:
    """Compare what `torch.save` wrote into a part of a file with the checksums in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with zipfile.ZipFile(io.BufferedReader(Window(descriptor, start, stop - start))) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        wrong = str(error)
    finally:
        os.close(descriptor)
    if wrong is not None:
        raise damaged_file(path, f"another checksum in bytes {start} to {stop} ({wrong})")


def make_hole(path: Path, size: int) -> None:
    """Make an empty file of a size, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.truncate(size)


def _choose(store: Store, series: bool) -> tuple[str, Commit]:
    """Return the address and the commit to load."""
    if not series:
        commit = commits.newest(store)
        if commit is None:
            raise CheckpointNotFoundError(
                f"There is no complete checkpoint at {str(store.address)!r}; got {_what_is(store)} there. Pass an "
                "address that save_state wrote to."
            )
        return str(store.address), commit
    seen = []
    for number in reversed(commits.numbered(store)):
        place = store.below(f"checkpoint_{number}")
        commit = commits.newest(place)
        if commit is not None and (problem := _incomplete(place, commit)) is None:
            return str(place.address), commit
        seen.append(f"checkpoint_{number}: {_what_is(place) if commit is None else problem}")
        logger.warning("The checkpoint %s is not complete and left out: %s", place.address, seen[-1])
    raise CheckpointNotFoundError(
        f"There is no complete checkpoint_<number> at {str(store.address)!r}; got {'; '.join(seen) or 'none'}. Start "
        "the run from the beginning."
    )


def _incomplete(store: Store, commit: Commit) -> str | None:
    """Return what is missing of a save that was committed: somebody deleted it since."""
    try:
        _, manifest = _manifest_of(store, commit)
    except CheckpointDamagedError as error:
        return str(error)
    stored = store.sizes(commit.folder)
    if f"{total_of((name, size) for name, size in stored.items() if name != names.MANIFEST_NAME):x}" == manifest.total:
        return None  # all files, also those in lists
    manifest = commits.with_lists(store, commit, manifest, manifest.listing())
    if manifest.lost:
        return "; ".join(f"{name} {problem}" for name, problem in [*manifest.lost.items()][:_SHOWN])
    sizes = {each.name: each.size for each in manifest.entries}
    unlike = [name for name, size in sizes.items() if stored.get(name) != size]
    # A store may list an object late that it knows by its name at once.
    unlike = [name for name in unlike if store.size(f"{commit.folder}/{name}") != sizes[name]]
    return f"{unlike[:_SHOWN]} are missing, or not of their size" if unlike else None


def _manifest_of(store: Store, commit: Commit) -> tuple[bytes, Manifest]:
    try:
        return commits.read_manifest(store, commit)
    except FileNotFoundError as error:
        place = store.address / commit.folder / names.MANIFEST_NAME
        raise damaged_file(place, "no manifest, although it was committed") from error


def _what_is(store: Store) -> str:
    """Say what is at an address without a commit."""
    folders = commits.uncommitted(store)
    halves = [f"{len(store.sizes(folder))} files of a save that was not committed" for folder in folders]
    others = [name for name in store.children() if name not in folders][:_SHOWN]
    return "; ".join(halves + others) or "nothing"
