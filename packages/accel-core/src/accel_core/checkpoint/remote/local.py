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

_PASSING = re.compile(rf"(saving|loading)-[a-z]{{{names.ID_LENGTH}}}")
_NEAR = re.compile(rf"near-[a-z]{{{names.ID_LENGTH}}}")


@record
class LocalFolder:
    """A folder that the ranks of a machine use; whoever finds that its processes have ended deletes it."""

    root: Path
    name: str  # last name of the address, which the folder of the files gets
    lock: int | None = None  # held by the first rank of the machine for as long as the folder is used

    @classmethod
    def of(cls, cache: str | None, kind: str, identity: str, name: str, parent: str | None = None) -> LocalFolder:
        """Return the folder of one save or load, in `ProjectConfiguration.local_cache` or among temporary files.

        `parent` holds these, if not the folder of the system.
        """
        base = Path(cache) if cache is not None else Path(parent or tempfile.gettempdir()) / f"accel-{os.getuid()}"
        return cls(base / f"{'near' if kind == 'loading' and cache is not None else kind}-{identity}", name)

    @property
    def files(self) -> Path:
        """Where the checkpoint's files lie."""
        return self.root / self.name

    def make(self, *, alone: bool = False) -> None:
        """Make it, and delete what processes that ended left; the first rank of a machine calls it.

        Another one is made in its place if it has to be this run's `alone` and another one uses it.
        """
        try:
            self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.root.parent.stat().st_uid != os.getuid():
                raise PermissionError(f"{str(self.root.parent)!r} belongs to another user")
            _delete_unused(self.root.parent, _PASSING)
            while self.lock is None:
                self.files.mkdir(parents=True, exist_ok=True)
                self.lock = _locked(self.root, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
                if alone and self.lock is None:
                    self.root = self.root.with_name(f"loading-{names.fresh_id()}")
                elif not self.files.is_dir():  # another process took it for unused in between
                    self.release()
        except OSError as error:
            raise CheckpointError(
                f"Files of a checkpoint at an address pass through {str(self.root)!r}, which could not be made; got "
                f"{error}. Pass ProjectConfiguration(local_cache=...), or offload_folder, with a folder of your own."
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
                f"{str(self.root)!r}. Make room there, or pass ProjectConfiguration(local_cache=...) with a folder on "
                "another disk, or set TMPDIR."
            ) from error

    def keep_near(self, identity: str) -> None:
        """Keep the files for a later load, in place of those of any other save."""
        near = self.root.with_name(f"near-{identity}")
        if self.root != near:
            with contextlib.suppress(OSError):
                os.rename(self.root, near)
        self.root = near
        _delete_unused(near.parent, _NEAR, kept=near)
        self.release()

    def leave(self) -> None:
        """Delete it, unless another process uses it."""
        self.release()
        _delete_unused(self.root.parent, re.compile(re.escape(self.root.name)))

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


def _delete_unused(base: Path, pattern: re.Pattern[str], kept: Path | None = None) -> None:
    """Delete folders that no process that lives uses."""
    for folder in sorted(base.iterdir()) if base.is_dir() else []:
        lock = _locked(folder, fcntl.LOCK_EX) if pattern.fullmatch(folder.name) and folder != kept else None
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)
