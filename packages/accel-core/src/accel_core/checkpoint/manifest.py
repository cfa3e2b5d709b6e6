"""The list of everything in a checkpoint, and what makes a folder complete.

Every rank lists the files that it wrote in a manifest of its own below `accel_manifest/`. The manifest of the
checkpoint lists the files of the main rank, and names the ranks that have such lists.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import operator
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

import torch

from accel_core._records import record
from accel_core._version import __version__
from accel_core.checkpoint import names
from accel_core.checkpoint.digest import HashingFile, digest_of, digest_of_bytes
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError
from accel_core.host.installed import distributions, version_of

_VERSION = 1
_MOST_LISTS = 1 << 20
"""Lists that a manifest may name: one of more is invented."""


@record(frozen=True)
class Entry:
    """One file of a checkpoint."""

    name: str  # path below the folder, with forward slashes
    size: int
    digest: str  # xxh3-128 of the content, in hexadecimal digits
    rank: int = 0


@record(frozen=True)
class Manifest:
    """Everything in a checkpoint."""

    entries: tuple[Entry, ...]  # one for each file, sorted by name
    world_size: int
    versions: dict[str, str] = field(default_factory=dict)  # versions of the installed accel packages and of torch
    written_at: int = field(default_factory=time.time_ns)  # nanoseconds since the epoch
    save: str = field(default_factory=names.fresh_id)  # id of the save
    absent: int = 0  # number of further ranks, each of which lists its random states if it saved at the same step
    # First and last of ranks that list their files themselves; `None` where none was asked to.
    lists: tuple[tuple[int, int], ...] | None = None
    lost: dict[str, str] = field(default_factory=dict)  # what is wrong with lists that could not be read

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a folder with all of its lists; `None` in one without any, as Accelerate writes it."""
        head = cls.head(folder)
        return head and head.joined(lambda name: content_of(folder, name))

    @classmethod
    def head(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a folder without the lists that it names."""
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
        """Build a manifest from the bytes of its file."""
        try:
            data = json.loads(raw)
            entries = tuple(
                Entry(str(each["name"]), int(each["size"]), str(each["digest"]), int(each["rank"]))
                for each in data["entries"]
            )
            lists = tuple((int(first), int(last)) for first, last in data["lists"]) if "lists" in data else None
            size, written_at, absent = int(data["world_size"]), int(data["written_at"]), int(data.get("absent", 0))
            manifest = cls(entries, size, data["versions"], written_at, str(data["save"]), absent, lists)
            # What `encode` makes of it has the right checksum, form and types, so the same bytes have them too.
            whole = manifest._adds_up() and raw == manifest.encode()
        except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged_file(path, f"{type(error).__name__}: {error}") from error
        if not whole:
            raise damaged_file(path, "bytes that do not fit its own checksum or form")
        for entry in entries:
            check_name(entry.name, path)
        if len({entry.name for entry in entries}) != len(entries):
            raise damaged_file(path, "a file that it lists twice")
        return manifest

    def _adds_up(self) -> bool:
        """Return whether there is a rank, and lists are of ranks that are there, in rising order."""
        bounds = [-1, *(rank for first, last in self.lists or () for rank in (first, last + 1)), self.world_size + 1]
        few = sum(last - first for first, last in self.lists or ()) < _MOST_LISTS
        return self.world_size >= 1 and self.absent >= 0 and few and all(map(operator.lt, bounds, bounds[1:]))

    def encode(self) -> bytes:
        """Return the bytes of the manifest's file."""
        data = asdict(replace(self, entries=tuple(each for each in self.entries if not self.leaves(each.rank))))
        data = {name: value for name, value in data.items() if name not in ("absent", "lists", "lost")}
        data |= {"format": _VERSION} | ({"absent": self.absent} if self.absent else {})
        data |= {"lists": self.lists} if self.lists is not None else {}
        digest = digest_of_bytes(json.dumps(data, sort_keys=True).encode())
        return json.dumps(data | {"digest": digest}, indent=1, sort_keys=True).encode() + b"\n"

    def write(self, folder: Path, name: str = names.MANIFEST_NAME) -> Entry:
        """Write the manifest into a folder and flush it to disk."""
        return replace(write_bytes(folder / name, self.encode()), name=name)

    def leaves(self, rank: int) -> bool:
        """Return whether the files of a rank stand in a list of its own."""
        return any(first <= rank <= last for first, last in self.lists or ())

    def listing(self) -> list[int]:
        """Return the ranks that list their files themselves."""
        return [rank for first, last in self.lists or () for rank in range(first, last + 1)]

    def joined(
        self, read: Callable[[str], bytes], each: Callable[..., Iterable[tuple[Sequence[Entry], str]]] = map
    ) -> Manifest:
        """Return this manifest with the files in its lists.

        `read` returns the bytes of a list, or raises FileNotFoundError. It is called by `each`, instead of by `map`.
        """

        def opened(rank: int) -> tuple[Sequence[Entry], str]:
            name = names.list_name(rank)
            try:
                found = Manifest.decode(read(name), Path(name))
            except (FileNotFoundError, NotADirectoryError):
                return (), "is missing"
            except CheckpointDamagedError:
                return (), "is damaged"
            except OSError as error:
                return (), f"cannot be read ({error.strerror})"
            own = found.save == self.save and all(entry.rank == rank for entry in found.entries)
            return (found.entries, "") if own else ((), "is of another save")

        entries, lost, wanted = list(self.entries), dict(self.lost), self.listing()
        optional = range(1, self.absent + 1)  # ranks that saved for themselves, or did not
        for rank, (found, problem) in zip([*wanted, *optional], each(opened, [*wanted, *optional]), strict=False):
            entries += found
            if problem and rank not in optional:
                lost[names.list_name(rank)] = problem
        return replace(self, entries=tuple(sorted(entries, key=lambda entry: entry.name)), lost=lost)

    def files(self) -> list[str]:
        """Return the names of all files that are known, of all lists, and of the manifest."""
        apart = {entry.rank for entry in self.entries if 0 < entry.rank <= self.absent}  # who saved for themselves
        lists = map(names.list_name, sorted({*self.listing(), *apart}))
        return [*(entry.name for entry in self.entries), *lists, names.MANIFEST_NAME]

    def damages(self, folder: Path, only: Iterable[str] | None = None, *, contents: bool = True) -> dict[str, str]:
        """Compare the files of a folder with this manifest; return what is wrong with those that differ."""
        chosen = {entry.name for entry in self.entries} if only is None else set(only)
        compared = {entry.name: _compare(folder, entry, contents) for entry in self.entries if entry.name in chosen}
        lost = {name: problem for name, problem in self.lost.items() if only is None or name in chosen}
        return {name: problem for name, problem in compared.items() if problem} | lost

    def __contains__(self, name: object) -> bool:
        return any(entry.name == name for entry in self.entries)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the installed accel packages and of torch."""
    installed = {"accel-core": __version__, "torch": str(torch.__version__)}
    for name in distributions():
        if name == "accelerate" or name.startswith("accel-"):
            installed[name] = version_of(name) or "unknown"
    return installed


def check_name(name: str, where: Path) -> None:
    """Refuse a file name that leads out of its folder."""
    parts = name.split("/")
    # A backslash separates folders on Windows, where the same checkpoint may be read.
    if not name or name.startswith("/") or "\\" in name or "\0" in name or any(p in ("", ".", "..") for p in parts):
        raise UnsafeCheckpointError(
            f"A file name in {str(where)!r} leads outside its folder; got {name!r}. "
            "Do not use this checkpoint: names must be relative and free of '..'."
        )


def lies_inside(target: Path, name: str) -> bool:
    """Return whether a name refers, through no link, to something in a folder: only that may be deleted."""
    check_name(name, target)
    return Path(os.path.realpath((target / name).parent)).is_relative_to(os.path.realpath(target))


def owned_files(folder: Path) -> set[str]:
    """Return the names of the files that belong to the checkpoint in a folder.

    They are those in its manifest that still have the size that it says. Without a manifest, where there are signs of a
    checkpoint of Accelerate or a damaged one of accel, they are the documented names.
    """
    with contextlib.suppress(CheckpointError, OSError):
        known = Manifest.read(folder)
        if known is not None:
            return set(known.files()) - known.damages(folder, contents=False).keys()
    traces = (names.MANIFEST_NAME, names.PROGRESS_NAME, names.random_states_name(0))
    return set(names.found_in(folder)) if any(os.path.lexists(folder / name) for name in traces) else set()


def write_json(path: Path, content: object, *, rank: int = 0) -> Entry:
    """Write JSON and flush the file to disk."""
    return write_bytes(path, json.dumps(content, indent=1, sort_keys=True).encode() + b"\n", rank=rank)


def write_bytes(path: Path, content: bytes, *, rank: int = 0) -> Entry:
    """Write bytes and flush the file to disk."""
    with HashingFile(path) as file:
        file.write(content)
    return Entry(path.name, file.size, file.digest, rank)


def content_of(folder: Path, name: str, *, links: bool = False) -> bytes:
    """Return the bytes of a small file of a checkpoint."""
    with os.fdopen(open_member(folder, name, links=links), "rb") as file:
        return file.read()


def read_json(folder: Path, name: str, *, links: bool = False) -> Any:
    """Read a JSON file."""
    content = content_of(folder, name, links=links)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # the latter of lists in lists, thousands deep
        raise damaged_file(folder / name, f"text that is not JSON ({error})") from error


def open_member(folder: Path, name: str, *, links: bool = False) -> int:
    """Open a file of a checkpoint; unsafe is what is not a regular file in its folder, where `links` may lead out."""
    check_name(name, folder)
    path = folder / name
    try:
        path.lstat()
    except (UnicodeEncodeError, OSError) as error:
        # Nothing can lie below a file, or have a name that no filesystem takes.
        if isinstance(error, OSError) and error.errno not in (errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), repr(str(path))) from error
    if not links and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise UnsafeCheckpointError(
            f"A link in a checkpoint leads out of its folder; {str(path)!r} points to {os.path.realpath(path)!r}. "
            "Copy the file into the folder if you trust it."
        )
    _refuse_irregular(path, os.stat(path).st_mode)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not waiting for a FIFO that took the name since


def path_of(descriptor: int, path: str | os.PathLike[str]) -> str:
    """Return a path by which a library opens the file that is open, whatever lies at its own path by now."""
    opened = f"/proc/self/fd/{descriptor}"
    return opened if os.path.exists(opened) else os.fspath(path)


def damaged_file(path: str | os.PathLike[str], found: str) -> CheckpointDamagedError:
    """Return the error for a file whose content is not what its reader needs."""
    name = os.fspath(path)
    return CheckpointDamagedError(
        f"The checkpoint file {name!r} is damaged or in another format; got {found}. Load another checkpoint."
    )


def _compare(folder: Path, entry: Entry, contents: bool) -> str | None:
    try:
        descriptor = open_member(folder, entry.name)
        size = os.fstat(descriptor).st_size
        if size != entry.size or not contents:
            os.close(descriptor)
            return f"has {size} bytes instead of {entry.size}" if size != entry.size else None
        found = digest_of(folder / entry.name, descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if found == entry.digest else f"has checksum {found} instead of {entry.digest}"


def _refuse_irregular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        found = kinds.get(stat.S_IFMT(mode), "a device")
        raise UnsafeCheckpointError(
            f"A checkpoint holds regular files only; {str(path)!r} is {found}. Do not use this checkpoint."
        )
