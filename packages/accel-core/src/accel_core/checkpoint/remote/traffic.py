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
"""Seconds between two reports, and without a byte until that is said."""

_MIB = 1 << 20


@record
class Traffic:
    """What one rank's requests moved.

    Attributes:
        files: Files that were written.
        bytes: Bytes that were moved.
        retries: Requests that had to be repeated; those that the store's own library repeated are not counted.
        seconds: How long moving took.
        stalled: Seconds in which nothing moved, counted from when it was said.
    """

    files: int = 0
    bytes: int = 0
    retries: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    _moving: int = 0  # bytes of files that are under way

    def add(self, count: int) -> None:
        """Count bytes that have arrived."""
        self.bytes += count

    def callback(self) -> Any:
        """Return what fsspec tells of the bytes of a file while they move."""
        base: Any = importlib.import_module("fsspec.callbacks").Callback
        traffic = self

        class Moving(base):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                traffic._moving += inc

            def branched(self, *args: Any, **kwargs: Any) -> Any:
                return self

        return Moving()

    def __str__(self) -> str:
        """Return the figures as a line of a log."""
        rate = self.bytes / _MIB / self.seconds if self.seconds else 0.0
        text = f"{self.bytes / _MIB:,.1f} MiB in {self.seconds:.1f} s ({rate:,.1f} MiB/s)"
        return f"{text}, {self.retries} requests repeated" + (f", {self.stalled:.0f} s still" if self.stalled else "")

    @contextmanager
    def watched(self, doing: str, total: int) -> Iterator[None]:
        """Say every half minute how far it is, and that nothing moves where nothing does."""
        began, over = time.monotonic(), threading.Event()
        before = self.bytes

        def watch() -> None:
            seen, since = self._seen(), began
            while not over.wait(_REPORTED):
                now = time.monotonic()
                if self._seen() == seen:
                    self.stalled += _REPORTED
                    logger.warning(
                        "%s stands still: no byte moved for %.0f s, %d requests repeated so far. It goes on by itself "
                        "when the store answers.",
                        doing,
                        now - since,
                        self.retries,
                    )
                else:
                    seen, since = self._seen(), now
                    done = self.bytes - before
                    rate = done / _MIB / (now - began)
                    logger.info("%s: %.0f of %.0f MiB, %.1f MiB/s", doing, done / _MIB, total / _MIB, rate)

        thread = threading.Thread(target=watch, name="accel-traffic", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.seconds += time.monotonic() - began
            logger.info("%s: %s", doing, self)

    def _seen(self) -> tuple[int, int]:
        return self.bytes, self._moving
