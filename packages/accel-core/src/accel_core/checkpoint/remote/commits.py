"""Which save counts at an address."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from accel_core._records import record
from accel_core.checkpoint import names
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.manifest import Manifest, damaged_file
from accel_core.checkpoint.remote.store import PROBE, Store, at_once
from accel_core.errors import CheckpointError

_COMMIT = re.compile(r"accel_commit-(\d{8,})\.json")
_FOLDER = re.compile(rf"(\d{{8,}})-[a-z]{{{names.ID_LENGTH}}}")
_LOOKS = 10


@record(frozen=True)
class Commit:
    """What says that a save at an address counts."""

    number: int  # one above that of the save before it at this address
    save: str  # id of the save
    manifest: str  # digest of its manifest's bytes

    @property
    def name(self) -> str:
        """The name of its object."""
        return _commit_name(self.number)

    @property
    def folder(self) -> str:
        """The folder of the save's files."""
        return f"{self.number:08d}-{self.save}"

    def encode(self) -> bytes:
        """Return the bytes of its object."""
        return json.dumps(asdict(self)).encode()


def _commit_name(number: int) -> str:
    return f"accel_commit-{number:08d}.json"


def _read(store: Store, number: int) -> Commit | None:
    try:
        raw = store.read(_commit_name(number))
    except FileNotFoundError:
        return None
    try:
        commit = Commit(**json.loads(raw))
        whole = commit.encode() == raw and commit.number == number and _FOLDER.fullmatch(commit.folder) is not None
    except (ValueError, TypeError) as error:
        raise damaged_file(store.address / _commit_name(number), f"{type(error).__name__}: {error}") from error
    if not whole:
        raise damaged_file(store.address / _commit_name(number), "another commit than its name says")
    return commit


def newest(store: Store) -> Commit | None:
    """Return the commit that counts at an address; `None` where there is none."""
    for _ in range(_LOOKS):
        numbers = [int(found[1]) for found in map(_COMMIT.fullmatch, store.children()) if found]
        highest = max(numbers, default=0)
        found = _read(store, highest) if highest else None
        if found is not None or not highest:
            return found
        # Another save came between the two requests, and deleted the commit before its own.
    raise CheckpointError(
        f"What counts at {str(store.address)!r} could not be read; got another commit at each of {_LOOKS} looks. Save "
        "less often, or load a numbered checkpoint."
    )


def read_manifest(store: Store, commit: Commit) -> Manifest:
    """Return the list of the files of a save, with what each rank listed.

    Raises:
        CheckpointDamagedError: It is gone, or not the one that was committed.
    """
    place = store.address / commit.folder / names.MANIFEST_NAME
    try:
        raw = store.read(f"{commit.folder}/{names.MANIFEST_NAME}")
    except FileNotFoundError as error:
        raise damaged_file(place, "no manifest, although it was committed") from error
    if digest_of_bytes(raw) != commit.manifest:
        raise damaged_file(place, "another digest than its commit says")
    return Manifest.decode(raw, place).joined(lambda name: store.read(f"{commit.folder}/{name}"), at_once)


def numbered(store: Store) -> list[int]:
    """Return the numbers of the checkpoints of a series, rising."""
    return sorted(int(each[1]) for each in map(names.NUMBERED.fullmatch, store.children()) if each)


def clear(store: Store, kept: Commit | None = None) -> None:
    """Delete what a commit made useless: earlier commits, then folders of saves that can no longer commit.

    Where none is kept, the checkpoint goes: from the first moment on nothing takes what is left for one.
    """
    children = store.children()
    numbers = sorted(int(found[1]) for found in map(_COMMIT.fullmatch, children) if found)
    # Rising, so that no earlier commit comes to count.
    earlier = [_commit_name(number) for number in numbers if kept is None or number < kept.number]
    store.delete([*earlier, *(name for name in children if name.startswith(PROBE))])
    for folder in children:
        found = _FOLDER.fullmatch(folder)
        if found and (kept is None or (folder != kept.folder and int(found[1]) <= kept.number)):
            store.delete_folder(folder)
