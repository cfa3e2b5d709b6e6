"""How much went to or came from a store, how fast, and whether it stands still."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel_core._records import record

__all__ = ["Traffic"]

logger = logging.getLogger(__name__)

_REPORTED = 30.0
"""Seconds between two lines in the log: how far it is, or that no byte moved since the last one."""

_MIB = 1 << 20
_STILL = "%s stands still at %.0f of %.0f MiB: no byte moved for %.0f s. It goes on when the store answers."


@record
class Traffic:
    """What one rank's requests moved."""

    files: int = 0  # that were written
    bytes: int = 0
    retries: int = 0  # requests that were repeated, without those that the store's own library repeated
    seconds: float = 0.0
    stalled: float = 0.0  # seconds in which nothing moved
    moves: int = 0  # grows whenever something moves

    def add(self, count: int) -> None:
        """Count bytes that have arrived."""
        self.bytes += count
        self.moves += 1

    def callback(self) -> Any:
        """Return what fsspec tells of the parts of a file when they have moved."""
        return importlib.import_module("fsspec.callbacks").Callback(hooks={"moved": lambda *_, **__: self.add(0)})

    def __str__(self) -> str:
        """Return the figures as a line of a log."""
        rate = self.bytes / _MIB / self.seconds if self.seconds else 0.0
        text = f"{self.bytes / _MIB:,.1f} MiB in {self.seconds:.1f} s ({rate:,.1f} MiB/s)"
        return f"{text}, {self.retries} requests repeated, {self.stalled:.0f} s without a byte"

    @contextmanager
    def watched(self, doing: str, total: int, *, last: bool = True) -> Iterator[None]:
        """Say every half minute how far it is, that nothing moves where nothing does, and at `last` what it was."""
        began, before, over = time.monotonic(), self.bytes, threading.Event()

        def watch() -> None:
            seen = self.moves
            while not over.wait(_REPORTED):
                done = (self.bytes - before) / _MIB
                if self.moves == seen:
                    self.stalled += _REPORTED
                    logger.warning(_STILL, doing, done, total / _MIB, _REPORTED)
                else:
                    rate = done / (time.monotonic() - began)
                    logger.info("%s: %.0f of %.0f MiB, %.1f MiB/s", doing, done, total / _MIB, rate)
                seen = self.moves

        thread = threading.Thread(target=watch, name="accel-traffic", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.seconds += time.monotonic() - began
            logger.log(logging.INFO if last else logging.DEBUG, "%s: %s", doing, self)
