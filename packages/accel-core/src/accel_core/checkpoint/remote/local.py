"""Folders of this machine through which checkpoints pass on their way to a store and from it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import names
from accel_core.errors import CheckpointError

__all__ = ["LocalFolder"]

_NEAR = "near"
_KINDS = re.compile(rf"(saving|loading|{_NEAR})-([a-z]{{{names.ID_LENGTH}}})")


@record
class LocalFolder:
    """A folder that is used by the ranks of a machine, and deleted by whoever finds that its process has ended."""

    root: Path
    name: str
    lock: int | None = None  # held by the first rank of the machine for as long as the folder is used

    @classmethod
    def of(cls, cache: str | None, kind: str, identity: str, name: str) -> LocalFolder:
        """Return the folder of one save or load; without a `cache` it is among temporary files, and goes afterwards.

        Args:
            cache: `ProjectConfiguration.local_cache`.
            kind: "saving" or "loading".
            identity: Id of the save.
            name: Last name of the address, which the files' own folder gets.
        """
        base = Path(cache) if cache is not None else Path(tempfile.gettempdir()) / f"accel-{os.getuid()}"
        return cls(base / f"{_NEAR if kind == 'loading' and cache is not None else kind}-{identity}", name)

    @property
    def files(self) -> Path:
        """Where the checkpoint's files lie."""
        return self.root / self.name

    def make(self) -> None:
        """Make it, and delete what processes that ended left beside it; the first rank of a machine calls it."""
        try:
            self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.root.parent.stat().st_uid != os.getuid():
                raise CheckpointError(
                    f"Files of a checkpoint pass through {str(self.root.parent)!r}; got a folder of another user. Pass "
                    "ProjectConfiguration(local_cache=...) with a folder of your own."
                )
            for place in sorted(self.root.parent.iterdir()):
                found = _KINDS.fullmatch(place.name)
                if found and found[1] != _NEAR:
                    _delete_unused(place)
            while self.lock is None:
                self.files.mkdir(parents=True, exist_ok=True)
                self.lock = _locked(self.root, fcntl.LOCK_SH)
                if not self.files.is_dir():  # another process took it for unused in between
                    self.release()
        except OSError as error:
            raise CheckpointError(
                f"Files of a checkpoint at an address pass through {str(self.root)!r}, which could not be made; got "
                f"{error}. Pass ProjectConfiguration(local_cache=...) with a folder on a disk that has room."
            ) from error

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Say where room is missing, where a disk is full."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CheckpointError(
                f"The disk of this machine is full, through which a checkpoint at an address passes; got {error} in "
                f"{str(self.root)!r}. Make room there, or pass ProjectConfiguration(local_cache=...) with a folder on another "
                "disk, or set TMPDIR."
            ) from error

    def keep_near(self, identity: str) -> None:
        """Keep the files for a later load, in place of those of any other save."""
        near = self.root.with_name(f"{_NEAR}-{identity}")
        if self.root != near and self.root.is_dir():
            with contextlib.suppress(OSError):
                os.rename(self.root, near)
        for place in sorted(near.parent.iterdir()):
            found = _KINDS.fullmatch(place.name)
            if found and found[1] == _NEAR and place != near:
                _delete_unused(place)
        self.release()

    def delete(self) -> None:
        """Delete it and what is in it."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.release()

    def leave(self) -> None:
        """Delete it unless another process uses it."""
        self.release()
        _delete_unused(self.root)

    def release(self) -> None:
        """Say that it is not used any longer."""
        if self.lock is not None:
            # By name: a forked worker process has the same open file, and closing it here would not let go of it.
            fcntl.flock(self.lock, fcntl.LOCK_UN)
            os.close(self.lock)
            self.lock = None


def _locked(folder: Path, how: int) -> int | None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _delete_unused(folder: Path) -> None:
    """Delete a folder unless a process that lives uses it."""
    lock = _locked(folder, fcntl.LOCK_EX)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
