"""Weights at an address: those that `save_model` writes, of other tools, and of checkpoints of whole runs."""

from __future__ import annotations

import fcntl
import json
import multiprocessing.util
import os
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import commit as folders
from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.digest import digest_of, digest_of_bytes
from accel_core.checkpoint.manifest import check_name, damaged_file
from accel_core.checkpoint.remote import commits
from accel_core.checkpoint.remote.scratch import Scratch
from accel_core.checkpoint.remote.storage import probe
from accel_core.checkpoint.remote.store import Store
from accel_core.errors import CheckpointError, CheckpointNotFoundError

_SHARDS = "weights-"
_WHOLE = ".whole"
_OF_RUNS = (
    *(names.OPTIMIZER_NAME, names.SCHEDULER_NAME, names.SAMPLER_NAME, names.DATALOADER_NAME, names.RNG_STATE_NAME),
    *(names.CUSTOM_NAME, names.SCALER_NAME),
)


@record(frozen=True)
class StoredWeights:
    """Objects of weights at an address: names below a folder of a store."""

    address: Address
    store: Store
    folder: str
    objects: list[str]
    state: str  # another one where any of them is another
    name: str = ""  # the one that was asked for, where it is not all
    digests: dict[str, str] = field(default_factory=dict)  # as far as they are known

    def fetch(self) -> Path:
        """Return where they lie on this machine, after fetching them once for its processes."""
        identity = names.id_of(bytes.fromhex(digest_of_bytes(f"{self.address} {self.state}".encode())))
        for name in self.objects:
            check_name(name, self.address)
        scratch = Scratch.of(identity)
        scratch.make()
        # At the end of this process; a forked one does nothing when it ends, as the folder is its parent's.
        multiprocessing.util.Finalize(None, scratch.leave, exitpriority=0)
        files = scratch.folder / (self.address.name or "weights")
        with open(scratch.folder / ".fetching", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first process fetches, the others wait for it
            if not (scratch.folder / _WHOLE).exists():
                self.store.get_all({f"{self.folder}/{name}".lstrip("/"): files / name for name in self.objects})
                self._check(files)
                (scratch.folder / _WHOLE).touch()
        return files / self.name

    def _check(self, files: Path) -> None:
        """Make sure that what was fetched is what was found."""
        for name, expected in self.digests.items():
            if not (files / name).is_file() or digest_of(files / name) != expected:
                raise damaged_file(self.address / name, "another digest than its manifest has")
        again = self if self.digests else _objects(self.address)
        if again is None or again.state != self.state:
            raise CheckpointError(
                f"The weights at {str(self.address)!r} were replaced while they were fetched; got others at the end. "
                "Load them again."
            )


def local_weights(given: str | os.PathLike[str]) -> Path:
    """Return where weights lie on this machine; those at an address are fetched, once for its processes."""
    address = names.folder_of(given)
    if not isinstance(address, Address):
        return address
    found = _of_run(address) or _objects(address)
    if found is None:
        raise CheckpointNotFoundError(
            f"There are no weights at {str(address)!r}; got nothing there. Pass the address of a file of weights, of a "
            "folder with some, or of a checkpoint."
        )
    return found.fetch()


def put_weights(address: Address, write: Callable[[Path], None]) -> None:
    """Write weights to an address in place of those of the same format: readers find the old ones or the new ones.

    One file is put under its name. Shards are put into a folder of their own, and count from the put of their index on.
    """
    store = Store(address)
    probe(store)
    identity = names.fresh_id()
    scratch = Scratch.of(identity)
    scratch.make()
    files = scratch.folder / "weights"
    try:
        write(files)
        written = folders.files_in(files)
        before = store.sizes("")
        index = next((name for name in written if name.endswith(".json")), None)
        for name in written if index is None else set(written) - {index}:
            store.put(files / name, name if index is None else f"{_SHARDS}{identity}/{name}")
        if index is not None:
            content = json.loads((files / index).read_text())
            table = content["weight_map"]
            content["weight_map"] = {name: f"{_SHARDS}{identity}/{file}" for name, file in table.items()}
            (files / index).write_text(json.dumps(content))
            store.put(files / index, index)
        standing = {index} if index is not None else set(written)
        suffix = ".safetensors" if any(".safetensors" in name for name in written) else ".bin"
        stale = {name for name in before if suffix in name and _is_weights(name)} - standing
        # A whole file counts before an index, so it goes first, and an index before its shards.
        store.delete(sorted(stale, key=lambda name: ("/" in name or "-of-" in name, name.endswith(".json"), name)))
    finally:
        scratch.leave()


def _is_weights(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return names.is_shard(file) and (not folder or folder.startswith(_SHARDS))


def _of_run(address: Address) -> StoredWeights | None:
    """Return the weights of a checkpoint that `save_state` wrote, or those in one folder of it."""
    for place, folder in ((address, ""), (Address(address.parent), f"{address.name}/")):
        store = Store(place) if len(place.parts) > 1 else None
        commit = commits.newest(store) if store else None
        if store and commit:
            manifest = commits.read_manifest(store, commit)
            if manifest.lost:
                raise damaged_file(address, "; ".join(map(" ".join, manifest.lost.items())))
            kept = [each for each in manifest.entries if not each.name.startswith(_OF_RUNS)]
            inside = [each for each in kept if each.name.startswith(folder)]
            digests = {each.name.removeprefix(folder): each.digest for each in inside}
            at = f"{commit.folder}/{folder}".rstrip("/")
            return StoredWeights(address, store, at, list(digests), commit.save, digests=digests) if digests else None
    return None


def _objects(address: Address) -> StoredWeights | None:
    """Return weights that lie at an address as in a folder, or the one file that it names."""
    for place, name in ((address, ""), (Address(address.parent), address.name)):
        store = Store(place)
        # What is further below is not of these weights, but for shards that their index names.
        states = {key: state for key, state in store.states("").items() if "/" not in key or key.startswith(_SHARDS)}
        alone = name and not name.endswith(".json") and "-of-" not in name
        chosen = {key: state for key, state in states.items() if not alone or key == name}
        if chosen and (not name or name in chosen):
            return StoredWeights(address, store, "", list(chosen), str(sorted(chosen.items())), name)
    return None
