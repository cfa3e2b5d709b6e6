"""The thread that writes down what is logged before any tracker hears of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from accel_core.tracking.codec import encode
from accel_core.tracking.spool import SpoolWriter

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)


class Recorder:
    """Writes entries to the spool in order, then hands each on.

    Args:
        spool: The spool file, or `None` where it cannot be written: entries are handed on only.
    """

    def __init__(self, spool: SpoolWriter | None) -> None:
        self._spool = spool
        self._entries: deque[tuple[dict[str, Any], Callable[[], None]]] = deque()
        self._change = threading.Condition()
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="tracker-spool", daemon=True)
        self._thread.start()

    def put(self, entry: dict[str, Any], then: Callable[[], None]) -> None:
        """Queue an entry; `then` runs once it is written."""
        with self._change:
            self._entries.append((entry, then))
            self._change.notify_all()

    def mark(self, line: dict[str, Any]) -> None:
        """Write a line that is not an entry, at once."""
        if self._spool is None:
            return
        try:
            self._spool.write(line)
        except OSError as error:
            self._give_up(error)

    def drain(self, seconds: float) -> bool:
        """Wait until every entry is written, no longer than `seconds`; tell whether that is so."""
        deadline = time.monotonic() + seconds
        with self._change:
            while self._entries or self._busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._change.wait(left)
        return True

    def close(self) -> None:
        """End the thread after what is queued."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                while not self._entries:
                    if self._closing:
                        return
                    self._change.wait()
                entry, then = self._entries.popleft()
                self._busy = True
            if self._spool is not None:
                self.mark({key: encode(value) for key, value in entry.items()})
            then()

    def _give_up(self, error: OSError) -> None:
        spool, self._spool = self._spool, None
        if spool is not None:
            logger.warning(
                "The spool file %s cannot be written any more (%s); values that a tracker fails to take are lost from "
                "here on. Free the disk, or choose another folder with TrackerKwargs(spool_dir=...).",
                spool.path,
                error,
            )
