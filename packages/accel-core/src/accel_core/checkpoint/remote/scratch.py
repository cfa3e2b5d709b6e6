"""Folders of this machine through which files pass on their way to a store and from it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from accel_core._records import record
from accel_core.errors import CheckpointError


@record
class Scratch:
    """A temporary folder that the processes of a machine use; the next one that is made deletes what a kill left."""

    folder: Path
    lock: int | None = None  # kept for as long as the folder is used

    @classmethod
    def of(cls, identity: str, parent: str | None = None) -> Scratch:
        """Return the folder of a save or a load, in `parent` or among temporary files."""
        return cls(Path(parent or tempfile.gettempdir()) / f"accel-{os.getuid()}" / identity)

    def make(self) -> None:
        """Make the folder, if it is not there."""
        base = self.folder.parent
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            if base.stat().st_uid != os.getuid():
                raise PermissionError(f"{str(base)!r} belongs to another user")
            turn = _opened(base, fcntl.LOCK_EX)  # one process at a time looks what is used
            try:
                for left in base.iterdir():
                    _delete_unused(left)
                self.folder.mkdir(exist_ok=True)
                self.lock = _opened(self.folder, fcntl.LOCK_SH)
            finally:
                _close(turn)
        except OSError as error:
            raise CheckpointError(
                f"Files of a checkpoint at an address pass through {str(self.folder)!r}, which could not be made; got "
                f"{error}. Set TMPDIR to a folder of your own with room for them."
            ) from error

    def leave(self) -> None:
        """Delete the folder, unless another process uses it."""
        if self.lock is not None:
            _close(self.lock)
            self.lock = None
            _delete_unused(self.folder)


def _opened(folder: Path, how: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _close(descriptor: int) -> None:
    # Unlocked by name: a forked worker process has the same open file, and closing it here would not let go of it.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _delete_unused(folder: Path) -> None:
    try:
        lock = _opened(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        return
    shutil.rmtree(folder, ignore_errors=True)
    _close(lock)
