"""A part of an open file, read as if it were a file."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Window(io.RawIOBase):
    """Some bytes of a file that is open under a descriptor."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the part."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read into memory, to the end of the part at most; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._at)]
        done = 0
        # One call of the system reads 2 GiB at most.
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._offset + self._at + done)
            if count == 0:
                break
            done += count
        self._at += done
        return done
