"""Deleting and replacing large files without waiting until the disk has freed their blocks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

__all__ = ["hold", "release", "remove", "wait"]

_LARGE = 1 << 20
_MOST_HELD = 64  # a process may open only so many files

_freeing: list[threading.Thread] = []


def hold(path: str | os.PathLike[str]) -> int | None:
    """Open a large file that has no other name, so that its blocks outlive its name."""
    # Opening another's file can fail for any reason that the file has; then its blocks are freed at once instead.
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size >= _LARGE:
            # Not blocking: opening a FIFO that took the name meanwhile would wait for a writer.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    return None


def release(held: Iterable[int | None]) -> None:
    """Close the files that `hold` opened, in a thread: closing waits until the system has freed the blocks.

    If the process ends first, the system closes them.
    """
    descriptors = [descriptor for descriptor in held if descriptor is not None]
    if not descriptors:
        return
    thread = threading.Thread(target=_close, args=(descriptors,), name="accel-deferred-delete", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end
        _close(descriptors)
    else:
        _freeing.append(thread)


def remove(folder: Path) -> None:
    """Delete a folder; its names are gone when the call returns, the space of its large files a little later."""
    walked = list(os.walk(folder))
    for path in (os.path.join(place, name) for place, inner, _ in walked for name in inner):
        # Before anything is deleted: `rmtree` would empty what is mounted before it fails.
        if os.path.ismount(path):
            raise OSError(errno.EBUSY, "Another filesystem is mounted in it", path)
    files = (os.path.join(place, name) for place, _, names in walked for name in names)
    held = list(itertools.islice((large for large in map(hold, files) if large is not None), _MOST_HELD))
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _close(held)
        held = []
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
        # A network filesystem gives an open file that is deleted another name in its folder until it is closed.
        shutil.rmtree(folder)
    release(held)


def wait() -> None:
    """Wait until the space of everything that was removed or released is free."""
    while _freeing:
        _freeing.pop().join()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
