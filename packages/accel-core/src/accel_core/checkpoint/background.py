"""One save at a time, in a thread of its own, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from accel_core.checkpoint.ranks import Ranks
from accel_core.process.world import World

__all__ = ["Handle", "finish", "own_ranks", "start"]


class Handle:
    """A save that is under way.

    The process does not exit before it is done.
    """

    def __init__(self, work: Callable[[], object], target: Path) -> None:
        self.target = target
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="accel-checkpoint", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Tell whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its folder.

        Args:
            timeout: Seconds to wait; without end where `None`.

        Raises:
            CheckpointError: Writing failed on some rank.
            TimeoutError: The save is still under way.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The save of {str(self.target)!r} is still under way after {timeout} s. Wait longer, or without end."
            )
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.target

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error


_in_flight: Handle | None = None


def start(work: Callable[[], object], target: Path) -> Handle:
    """Start the one save in flight; `finish` must have been called."""
    global _in_flight
    _in_flight = Handle(work, target)
    return _in_flight


def finish() -> None:
    """Wait for the save in flight, if there is one, and raise its error unless `wait` raised it before."""
    global _in_flight
    handle, _in_flight = _in_flight, None
    if handle is not None:
        handle.wait()


def own_ranks(world: World) -> Ranks:
    """Return the ranks on a gloo group of their own, so that training's collectives are not disturbed.

    Every rank calls it, from the thread that trains.
    """
    return Ranks(world, "save_state in the background", lane="checkpoint")
