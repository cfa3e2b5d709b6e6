"""Noticing that a checkpoint was replaced or altered while it was read."""

from __future__ import annotations

import os
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import commit, names

__all__ = ["Opened"]

Seen = tuple[int, int, int, int]
"""Device, inode, size and time of the last change of a file's content."""


@record(frozen=True)
class Opened:
    """What the files of a checkpoint were when reading began.

    No save writes into a file that has a public name: it puts another file there. So, as long as every name still means
    the file that it meant at the beginning, everything that was read in between is of one save.

    Attributes:
        target: The folder that was saved to.
        folder: Where its files are read.
        files: What each name meant; `None` for one that was not there.
    """

    target: Path
    folder: Path
    files: dict[str, Seen | None]

    @classmethod
    def look(cls, target: Path, folder: Path, read: list[str]) -> Opened:
        """Record which files the names that are about to be read refer to now."""
        return cls(target, folder, {name: _seen(folder / name) for name in [*read, names.MANIFEST_NAME]})

    def replaced(self) -> bool:
        """Return whether any name means another file now, or another save counts."""
        if any(_seen(self.folder / name) != seen for name, seen in self.files.items()):
            return True
        try:
            return not any(_same(held.folder, self.folder) for held in commit.holdings(self.target))
        except (FileNotFoundError, NotADirectoryError):  # another process deletes the checkpoint at this moment
            return True

    def altered(self) -> bool:
        """Return whether anything was written into a file that has its name still, which no save of accel does."""
        now = {name: _seen(self.folder / name) for name in self.files}
        return any(
            seen is not None and found is not None and seen[:2] == found[:2] and seen != found
            for seen, found in ((seen, now[name]) for name, seen in self.files.items())
        )


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _seen(path: Path) -> Seen | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
