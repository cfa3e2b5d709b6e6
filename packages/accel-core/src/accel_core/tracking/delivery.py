"""One thread for each tracker: whatever a tracker does, the run does not wait for it."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from accel_core._records import record
from accel_core.tracking.tracker import GeneralTracker

__all__ = ["Call", "Delivery"]

_MOST_WAITING = 100_000


@record(frozen=True)
class Call:
    """One call of a tracker.

    Attributes:
        method: Name of the tracker's method.
        args: Positional arguments.
        kwargs: Keyword arguments.
        seq: Number of the entry in the spool, or `None` for calls that are not entries.
    """

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    seq: int | None = None


class Delivery:
    """Makes a tracker and calls it, all in one thread, in the order of `put`.

    Args:
        name: The tracker's name, unique in its run.
        make: Makes the tracker, or returns the one that the user made.
        settle: Told after every call: the call, and the error that it raised or `None`.
        fills_step: Whether the tracker wants a step with every call.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], GeneralTracker],
        settle: Callable[[str, Call, Exception | None], None],
        fills_step: bool = False,
    ) -> None:
        self.name = name
        self.fills_step = fills_step
        self.tracker: GeneralTracker | None = None
        self.state: dict[str, Any] = {}
        self._make = make
        self._settle = settle
        self._calls: deque[Call] = deque()
        self._change = threading.Condition()
        self._busy = False
        self._closing = False
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def start(self, on_caller: bool) -> None:
        """Make and start the tracker, in this thread or without waiting in the tracker's own."""
        if on_caller:
            self.call(Call("start"))
        else:
            self.put(Call("start"))
        self._thread.start()

    def put(self, call: Call) -> None:
        """Queue a call. Beyond a hundred thousand the spool alone holds them."""
        with self._change:
            if len(self._calls) < _MOST_WAITING and not self._closing:
                self._calls.append(call)
                self._change.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is queued or running, no longer than `seconds`; tell whether that is so."""
        deadline = time.monotonic() + seconds
        with self._change:
            while self._calls or self._busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._change.wait(left)
        return True

    def finish(self) -> None:
        """Queue the tracker's end; it takes no other call after that."""
        with self._change:
            if not self._closing:
                self._calls.append(Call("finish"))
            self._closing = True
            self._change.notify_all()

    def close(self, seconds: float) -> bool:
        """Wait for the end that `finish` queued, no longer than `seconds`.

        Returns:
            Whether everything was called; otherwise the thread is left to its call and takes no other.
        """
        done = self.drain(seconds)
        with self._change:
            self._calls.clear()
        if done:
            self._thread.join()
        return done

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                while not self._calls:
                    if self._closing:
                        return
                    self._change.wait()
                call = self._calls.popleft()
                self._busy = True
            self.call(call)

    def call(self, call: Call) -> None:
        """Make a call in this thread and settle it; nothing raises."""
        error: Exception | None = None
        try:
            self._context.run(self._carry_out, call)
        except Exception as raised:
            error = raised
        self._settle(self.name, call, error)

    def _carry_out(self, call: Call) -> None:
        if call.method == "start":
            made = self._make()
            made.start()
            self.tracker = made
            self.state = made.state_dict()
        elif self.tracker is not None:
            getattr(self.tracker, call.method)(*call.args, **(call.kwargs or {}))
            if call.method == "load_state_dict":
                self.state = self.tracker.state_dict()
        elif call.method != "finish":
            raise RuntimeError("the tracker did not start")

    def adopt_context(self) -> None:
        """Give the calling thread the context variables that the library set when it started, such as its run."""
        missing = object()
        for variable, value in self._context.items():
            if variable.get(missing) is not value:
                variable.set(value)
