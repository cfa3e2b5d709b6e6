"""The list of everything in a checkpoint, and what makes a folder complete."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import json
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

import torch

from accel_core._records import record
from accel_core._version import __version__
from accel_core.checkpoint import names
from accel_core.checkpoint.digest import HashingFile, digest_of, digest_of_bytes
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError

__all__ = [
    "Entry",
    "FoundSave",
    "Manifest",
    "check_name",
    "found_save",
    "lies_inside",
    "open_member",
    "owned_files",
    "versions",
]

_VERSION = 1


@record(frozen=True)
class Entry:
    """One file of a checkpoint.

    Attributes:
        name: Path below the folder, with forward slashes.
        size: Bytes.
        digest: xxh3-128 of the content, in hexadecimal digits.
        rank: The rank that wrote it.
    """

    name: str
    size: int
    digest: str
    rank: int = 0


@record(frozen=True)
class Manifest:
    """Everything in a checkpoint.

    Attributes:
        entries: One for each file, sorted by name.
        world_size: Number of ranks that wrote it.
        versions: Versions of the installed accel packages and of torch.
        written_at: Nanoseconds since the epoch.
        save: Id of the save, the same on every disk that the ranks write to.
        absent: Number of further ranks of the run, of which nothing was written: rank 0 saved alone.
    """

    entries: tuple[Entry, ...]
    world_size: int
    versions: dict[str, str] = field(default_factory=dict)
    written_at: int = field(default_factory=time.time_ns)
    save: str = field(default_factory=names.fresh_id)
    absent: int = 0

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder.

        Raises:
            CheckpointNotFoundError: There is no such folder.
            CheckpointDamagedError: The manifest is missing though the folder is ours, or it is damaged.
            UnsafeCheckpointError: It lists a file outside the folder.
        """
        if not folder.is_dir():
            raise CheckpointNotFoundError(
                f"No checkpoint at {str(folder)!r}; got {'a file' if folder.exists() else 'nothing'} there. Pass a "
                "folder that save_state wrote."
            )
        path = folder / names.MANIFEST_NAME
        try:
            descriptor = open_member(folder, names.MANIFEST_NAME)
        except FileNotFoundError:
            if os.path.lexists(folder / names.PROGRESS_NAME):
                raise CheckpointDamagedError(
                    f"The checkpoint {str(folder)!r} has lost its manifest; got {names.PROGRESS_NAME} without "
                    f"{names.MANIFEST_NAME}. Load another checkpoint."
                ) from None
            return None
        with os.fdopen(descriptor, "rb") as file:
            return cls.decode(file.read(), path)

    @classmethod
    def decode(cls, raw: bytes, path: Path) -> Manifest:
        """Build a manifest from the bytes of its file.

        Raises:
            CheckpointDamagedError: The bytes are not what `encode` gives.
            UnsafeCheckpointError: It lists a file outside the folder.
        """
        try:
            data = json.loads(raw)
            claimed = data.pop("digest")
            entries = tuple(Entry(**entry) for entry in data["entries"])
            fields = ("world_size", "versions", "written_at", "save")
            manifest = cls(entries=entries, absent=data.get("absent", 0), **{name: data[name] for name in fields})
            whole = data.keys() - {"absent"} == {"entries", "format", *fields}
            whole = whole and isinstance(manifest.save, str)
            whole = whole and claimed == _digest(data) and all(_well_typed(entry) for entry in entries)
            whole = whole and type(manifest.world_size) is int and manifest.world_size >= 1
            whole = whole and type(manifest.written_at) is int and data["format"] == _VERSION
            whole = whole and type(manifest.absent) is int and manifest.absent >= 0
            whole = whole and raw == manifest.encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error
        if not whole:
            raise _damaged(path, "bytes that do not fit its own checksum or form")
        for entry in entries:
            check_name(entry.name, path)
        if len({entry.name for entry in entries}) != len(entries):
            raise _damaged(path, "a file that it lists twice")
        return manifest

    def encode(self) -> bytes:
        """Return the bytes of the manifest's file."""
        data: dict[str, Any] = {
            "entries": [asdict(entry) for entry in self.entries],
            "world_size": self.world_size,
            "versions": self.versions,
            "written_at": self.written_at,
            "save": self.save,
            "format": _VERSION,
        }
        data |= {"absent": self.absent} if self.absent else {}
        return json.dumps(data | {"digest": _digest(data)}, indent=1, sort_keys=True).encode() + b"\n"

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder and flush it to disk."""
        with HashingFile(folder / names.MANIFEST_NAME) as file:
            file.write(self.encode())

    def damages(self, folder: Path, only: Iterable[str] | None = None, *, contents: bool = True) -> dict[str, str]:
        """Compare the files of a folder with this manifest.

        Raises:
            UnsafeCheckpointError: A file is no regular file or leads out of the folder.
        """
        chosen = None if only is None else set(only)
        wrong: dict[str, str] = {}
        for entry in self.entries:
            if chosen is None or entry.name in chosen:
                problem = _compare(folder, entry, contents)
                if problem:
                    wrong[entry.name] = problem
        return wrong

    def __contains__(self, name: object) -> bool:
        return any(entry.name == name for entry in self.entries)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the installed accel packages and of torch."""
    installed = {"accel-core": __version__, "torch": str(torch.__version__)}
    for distribution in importlib.metadata.distributions(name=None):
        name = distribution.name
        if name == "accelerate" or name.startswith("accel-"):
            installed[name] = distribution.version
    return installed


@record(frozen=True)
class FoundSave:
    """One checkpoint that a disk holds for a target.

    Attributes:
        folder: Where its files are.
        identity: Which save it is; the same on all disks that this save was written to.
        whole: Whether all of its files are there with their sizes.
        committed: Whether its save was committed, as far as this disk knows.
        written_at: Nanoseconds since the epoch.
    """

    folder: Path
    identity: str
    whole: bool
    committed: bool
    written_at: int


def found_save(folder: Path, *, committed: bool = False, foreign: bool = True) -> FoundSave:
    """Return what a folder holds; without a manifest it is whole as a folder of Accelerate, if it may be `foreign`."""
    manifest, identity, whole = None, "damaged", False
    with contextlib.suppress(CheckpointError, OSError):
        manifest = Manifest.read(folder)
        identity = "" if manifest is None else f"save {manifest.save}"
        if manifest is None:
            whole = foreign and (folder / names.random_states_name(0)).is_file()
        else:
            whole = not manifest.damages(folder, contents=False)
    return FoundSave(folder, identity, whole, committed, 0 if manifest is None else manifest.written_at)


def check_name(name: str, where: Path) -> None:
    """Refuse a file name that leads out of its folder.

    Raises:
        UnsafeCheckpointError: The name is absolute, holds `..`, or is not normal.
    """
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or any(p in ("", ".", "..") for p in parts):
        raise UnsafeCheckpointError(
            f"A file name in {str(where)!r} leads outside its folder; got {name!r}. "
            "Do not use this checkpoint: names must be relative and free of '..'."
        )


def lies_inside(target: Path, name: str) -> bool:
    """Return whether a name refers, through no link, to something in a folder: only that may be deleted.

    Raises:
        UnsafeCheckpointError: The name is absolute or holds `..`.
    """
    check_name(name, target)
    return Path(os.path.realpath((target / name).parent)).is_relative_to(os.path.realpath(target))


def owned_files(target: Path) -> tuple[list[str], Callable[[str], bool]]:
    """Return the names that belong to the checkpoint in a folder, and whether a name still refers to its file.

    These are the names in its manifest. Without a manifest, where there are signs of a checkpoint of Accelerate or a
    damaged one of accel, they are the documented names.
    """
    known: Manifest | None = None
    with contextlib.suppress(CheckpointError, OSError):
        known = Manifest.read(target)
    if known is not None:

        def unchanged(name: str) -> bool:
            try:
                return not known.damages(target, [name])
            except (UnsafeCheckpointError, OSError):
                return False

        return [entry.name for entry in known.entries], unchanged
    traces = (names.MANIFEST_NAME, names.PROGRESS_NAME, names.random_states_name(0))
    if not any(os.path.lexists(target / name) for name in traces):
        return [], lambda name: False
    found = [name for name in names.found_in(target) if name != names.MANIFEST_NAME]
    return found, lambda name: stat.S_ISREG(os.lstat(target / name).st_mode)


def open_member(folder: Path, name: str, *, links: bool = False) -> int:
    """Open a file of a checkpoint for reading.

    Raises:
        UnsafeCheckpointError: The name or a link leads out of the folder, or it is no regular file.
        FileNotFoundError: There is no such file, nor can there be one of that name.
    """
    check_name(name, folder)
    path = folder / name
    try:
        path.lstat()
    except (UnicodeEncodeError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), repr(str(path))) from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    if not links and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise UnsafeCheckpointError(
            f"A link in a checkpoint leads out of its folder; {str(path)!r} points to {os.path.realpath(path)!r}. "
            "Copy the file into the folder if you trust it."
        )
    _refuse_irregular(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_irregular(path, os.fstat(descriptor).st_mode)
    except UnsafeCheckpointError:
        os.close(descriptor)
        raise
    return descriptor


def _compare(folder: Path, entry: Entry, contents: bool) -> str | None:
    try:
        descriptor = open_member(folder, entry.name)
    except FileNotFoundError:
        return "is missing"
    except NotADirectoryError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    size = os.fstat(descriptor).st_size
    if size != entry.size:
        os.close(descriptor)
        return f"has {size} bytes instead of {entry.size}"
    if not contents:
        os.close(descriptor)
        return None
    found = digest_of(folder / entry.name, lambda _: descriptor)
    return None if found == entry.digest else f"has checksum {found} instead of {entry.digest}"


def _refuse_irregular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UnsafeCheckpointError(
            f"A checkpoint holds regular files only; {str(path)!r} is {_kind(mode)}. Do not use this checkpoint."
        )


def _digest(data: dict[str, Any]) -> str:
    return digest_of_bytes(json.dumps(data, sort_keys=True).encode())


def _well_typed(entry: Entry) -> bool:
    return (
        isinstance(entry.name, str)
        and type(entry.size) is int
        and isinstance(entry.digest, str)
        and type(entry.rank) is int
    )


def _damaged(path: Path, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"The manifest {str(path)!r} is damaged; got {found}. Load another checkpoint.")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")
