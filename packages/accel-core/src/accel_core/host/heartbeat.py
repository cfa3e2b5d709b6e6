"""Signs of life of a training loop, for a watchdog in another process.

The launcher makes one small shared record for each rank and names it in `ACCEL_HEARTBEAT`. Prepared loaders and
optimizers write into it when a batch is given and when the optimizer is asked to step; whoever watches reads it without
asking the process. Where the variable is not set, nothing is written. Nothing in this file imports torch.

A loop of your own, which neither reads a prepared loader nor steps a prepared optimizer for a long time, may call
`beat()` itself.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import time

from accel_core._records import record
from accel_core.host import environ

VARIABLE = "ACCEL_HEARTBEAT"
"""Variable that holds the path of a rank's record."""

_MAGIC = b"accel-hb"
_RECORD = struct.Struct("<qqq")
_BEGIN = len(_MAGIC)
_SIZE = _BEGIN + _RECORD.size


@record(frozen=True)
class Progress:
    """What a process wrote."""

    at: float  # when it last wrote, on the monotonic clock in seconds
    beats: int  # number of batches and optimizer steps so far, 0 where the process has not come to its first
    loops: int  # number of prepared loaders that are being read


class Heartbeat:
    """The writing side, in the process that trains."""

    def __init__(self, path: str | None) -> None:
        self._memory = None if path is None else _attach(path)
        self._beats = 0
        self._loops = 0

    def beat(self) -> None:
        """Note a batch or an optimizer step."""
        if self._memory is not None:
            self._beats += 1
            _RECORD.pack_into(self._memory, _BEGIN, time.monotonic_ns(), self._beats, self._loops)

    def loops(self, number: int) -> None:
        """Note how many prepared loaders are being read."""
        if self._memory is not None:
            self._loops = number
            _RECORD.pack_into(self._memory, _BEGIN, time.monotonic_ns(), self._beats, number)


class Sensor:
    """The watching side: it makes the record, in memory that no file system holds (`memfd_create`), and reads it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("accel-heartbeat")
        self.reset()

    @staticmethod
    def possible() -> bool:
        """Return whether this system has such memory; Linux does."""
        return hasattr(os, "memfd_create")

    @property
    def path(self) -> str:
        """What a process on this machine opens it by, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def reset(self) -> None:
        """Forget what was written, for a process that starts anew."""
        os.pwrite(self._descriptor, _MAGIC + bytes(_RECORD.size), 0)

    def read(self) -> Progress:
        """Return what was last written."""
        at, beats, loops = _RECORD.unpack(os.pread(self._descriptor, _RECORD.size, _BEGIN))
        return Progress(at / 1e9, beats, loops)

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._descriptor)


def _attach(path: str) -> mmap.mmap | None:
    """Map the record, if what `path` leads to is one: in another container it may lead to a stranger's file."""
    with contextlib.suppress(OSError):
        # Whatever lies at the path: opening it must not wait, nor make it the terminal of this process.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_size == _SIZE and os.pread(descriptor, _BEGIN, 0) == _MAGIC:
                return mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
    return None


_HEART = Heartbeat(environ.text(VARIABLE))

beat = _HEART.beat
"""Note a batch or an optimizer step of this process."""

loops = _HEART.loops
"""Note how many prepared loaders this process is reading."""
