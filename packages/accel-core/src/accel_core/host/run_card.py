"""What a process tells the launcher about its run: checkpoints, how fast its epochs went, how long it waited for data.

The launcher makes a small file in memory for the first rank of a machine and names it in `ACCEL_RUN_CARD`. The rank
writes into it where an epoch ends and where a checkpoint is complete, and never in a training step; the launcher reads
it when the run has ended. Where the variable is not set, nothing is written. Nothing in this file imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

from accel_core.host import environ

VARIABLE = "ACCEL_RUN_CARD"
"""Variable that holds the path of the file."""

MEMORY_RAN_OUT = "Memory ran out"
"""How the lines below a traceback begin that say what held memory."""

_MAGIC = b"accel-card\n"
_END: Any = object()


class RunCard:
    """The writing side, in the process that trains, which writes if a launcher wants it."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.wanted = path is not None
        self._facts: dict[str, Any] = {}
        self._read: dict[int, tuple[int, float]] = {}
        self._waited: dict[int, list[float]] = {}

    def timed(self, loader: object, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass the batches of a loader on, and add up how long the script waits for them: two clock reads each."""
        waited, clock = self._waited.setdefault(id(loader), [0.0]), time.perf_counter
        while True:
            asked = clock()
            batch = next(batches, _END)
            waited[0] += clock() - asked
            if batch is _END:
                return
            yield batch

    def epoch(self, loader: object, samples: int, seconds: float) -> None:
        """Note what all ranks read of a loader, and how long that took; the one that took longest is trained with."""
        before = self._read.get(id(loader), (0, 0.0))
        self._read[id(loader)] = before[0] + samples, before[1] + seconds
        trained = max(self._read, key=lambda key: self._read[key][1])
        self._facts["samples"], self._facts["seconds"] = self._read[trained]
        self._facts["waited"] = self._waited.get(trained, [0.0])[0]
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._facts["device_bytes"] = int(torch.cuda.max_memory_allocated())
        self._write()

    def utilization(self, share: float) -> None:
        """Note the share of its devices' peak that the run uses; it is written with the next epoch or checkpoint."""
        self._facts["mfu"] = share

    def checkpoint(self, folder: str) -> None:
        """Note a checkpoint that is complete."""
        self._facts["checkpoint"] = folder
        self._write()

    def _write(self) -> None:
        """Write all facts, if what the path leads to is such a file: elsewhere it may lead to a stranger's."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            # Whatever lies at the path: opening it must not wait, nor make it the terminal of this process.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and os.pread(descriptor, len(_MAGIC), 0) == _MAGIC:
                    text = json.dumps(self._facts).encode()
                    os.pwrite(descriptor, text, len(_MAGIC))
                    os.ftruncate(descriptor, len(_MAGIC) + len(text))  # the text before may have been longer
            finally:
                os.close(descriptor)


class CardReader:
    """The reading side, in the launcher: it makes the file, in memory that no file system holds (`memfd_create`)."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("accel-card") if hasattr(os, "memfd_create") else -1
        if self._descriptor >= 0:
            os.pwrite(self._descriptor, _MAGIC, 0)

    def variables(self) -> dict[str, str]:
        """Return what the writing process needs in its environment."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"} if self._descriptor >= 0 else {}

    def close(self) -> dict[str, Any]:
        """Return what was written, and give the memory back."""
        if self._descriptor < 0:
            return {}
        text = os.pread(self._descriptor, 1 << 16, len(_MAGIC))
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:  # nothing was written, or the rank was killed while it wrote
            return {}
        return found


card = RunCard(environ.text(VARIABLE) or None)
"""The card of this process."""
