"""Deleting large folders without waiting until the disk has freed their blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove", "wait"]

_LARGE = 1 << 20
_MOST_HELD = 64

_freeing: list[threading.Thread] = []


def remove(folder: Path) -> None:
    """Delete a folder; its names are gone when the call returns, the space of its large files a little later.

    A file that is open loses its name at once and its blocks when it is closed, which a thread does. If the process
    dies first, the system closes it.

    Args:
        folder: What to delete.

    Raises:
        OSError: Something in it cannot be deleted.
    """
    held = list(_hold(folder))
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _close(held)
        held = []
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
        # A network filesystem gives an open file that is deleted another name in its folder until it is closed.
        shutil.rmtree(folder)
    if held:
        thread = threading.Thread(target=_close, args=(held,), name="accel-disposal", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end
            _close(held)
        else:
            _freeing.append(thread)


def wait() -> None:
    """Wait until the space of everything that was removed is free."""
    while _freeing:
        _freeing.pop().join()


def _hold(folder: Path) -> Iterator[int]:
    """Open the large files of a folder that have no other name; at most so many."""
    count = 0
    for place, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size >= _LARGE:
                    yield os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                    count += 1
            if count == _MOST_HELD:
                return


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
