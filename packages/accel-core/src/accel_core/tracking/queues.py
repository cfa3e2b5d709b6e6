"""A tracker's queue and its thread, and the whole design of tracking.

A logging call copies its values, puts one call in the queue of each tracker, and returns. Each tracker has one thread,
which makes the tracker, starts it and carries its calls out in order, so that a library that is slow, hangs or raises
holds up neither the run nor the other trackers.

1. **A call that raises** is logged once for each tracker, and appended at once to a file of JSON lines beside the run.
2. **A queue that is full** (`MOST_WAITING` calls) is waited for once, for a second, and then misses calls until it has
   room: memory is bounded, and the number of these calls is logged.
3. **At the end** all trackers together have `drain_seconds`. What a tracker has not taken by then is written to the
   same file, with the call that it still holds, and one line says so.
4. **A process that is killed** loses what is in its queues, and what a library has not flushed.

The thread is a daemon: a library that never returns does not keep the process. A call leaves the queue when it is done
and not when it begins, so the queue always holds exactly what is not delivered.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple

from accel_core.tracking.snapshot import snapshot
from accel_core.tracking.tracker import GeneralTracker

QUEUED = frozenset(
    {"log", "log_artifact", "log_artifacts", "log_figure", "log_images", "log_table", "store_init_configuration"}
)
"""Methods of a tracker that are queued, and written down where they cannot be delivered."""

MOST_WAITING = 100_000
"""How many calls may wait in one queue."""

_WAIT_S = 1.0
_POLL_S = 0.01


class Call(NamedTuple):
    """One call of a tracker."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    step: int | None = None  # the step of the values, also where the tracker counts by itself
    time: float | None = None  # when it was made, in seconds since 1970


class TrackerQueue:
    """Makes a tracker and calls it, all in one thread, in the order of `put`.

    Attributes:
        tracker: The tracker, once it has started.
        state: What the tracker stores of its run.
        failures: How many calls raised.
        error: The last error, as text.
        switched_off: Whether it gets no more calls.
        dropped: How many calls found the queue full.
        late: Whether the run has waited for it without an answer, which it does once.
    """

    def __init__(
        self, name: str, kind: type[GeneralTracker], make: Callable[[], GeneralTracker], on_error: OnError
    ) -> None:
        self.name = name
        self.kind = kind
        self.tracker: GeneralTracker | None = None
        self.state: dict[str, Any] = {}
        self.failures = 0
        self.error: str | None = None
        self.switched_off = False
        self.dropped = 0
        self.late = False
        self._make = make
        self._on_error = on_error
        # Libraries keep their run in context variables, which a new thread does not have.
        self._context = contextvars.copy_context()
        # `put` is on the path of every training step: appending to both takes no lock that Python code holds.
        self._waiting: deque[Call | threading.Event | None] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Make and start the tracker, in the thread where its library wants to be started."""
        if self.kind.starts_on_caller:
            self._call(Call("start"), on_caller=True)
        else:
            self._append(Call("start"))

    def put(self, call: Call) -> bool:
        """Queue a call; return whether there was room for it."""
        if len(self._waiting) >= MOST_WAITING and not self._gets_room():
            self.dropped += 1
            return False
        self._append(call)
        return True

    def _gets_room(self) -> bool:
        """Wait for room, once: a loop that does nothing but log is faster than any tracker."""
        deadline = time.monotonic() + _WAIT_S
        while len(self._waiting) >= MOST_WAITING and not self.late:
            time.sleep(_POLL_S)
            self.late = time.monotonic() > deadline
        return len(self._waiting) < MOST_WAITING

    def drain(self, seconds: float) -> bool:
        """Wait until the calls that are queued now are done."""
        if not self._waiting:
            return True
        reached = threading.Event()
        self._append(reached)
        return reached.wait(seconds)

    def finish(self) -> None:
        """Queue the tracker's end, even if the queue is full."""
        self._append(Call("finish"))
        self._append(None)

    def close(self, seconds: float) -> list[Call]:
        """Wait for the end that `finish` queued, and return the logging calls that are not delivered by then."""
        self._thread.join(seconds)
        self._abandoned = self._thread.is_alive()
        if not self._abandoned and self.tracker is not None and self.kind.starts_on_caller:
            self._call(Call("release"), on_caller=True)
        return [call for call in self._waiting.copy() if isinstance(call, Call) and call.method in QUEUED]

    def adopt_context(self) -> None:
        """Give the calling thread the context variables that the library set when it started, such as its run."""
        missing = object()
        for variable, value in self._context.items():
            if variable.get(missing) is not value:
                variable.set(value)

    def _append(self, call: Call | threading.Event | None) -> None:
        self._waiting.append(call)
        self._wakeups.put(None)

    def _work(self) -> None:
        while not self._abandoned:
            self._wakeups.get()
            call = self._waiting[0]
            if isinstance(call, threading.Event):
                call.set()
            elif call is not None:
                self._call(call)
            self._waiting.popleft()
            if call is None:
                return

    def _call(self, call: Call, on_caller: bool = False) -> None:
        """Make a call in this thread, and report its error."""
        try:
            self._context.run(self._carry_out, call)
        # A tracker must not end its thread or the run, so SystemExit and the like count as failures. Only in the user's
        # own thread is KeyboardInterrupt raised again: there it may be the user's Ctrl-C.
        except BaseException as error:
            if on_caller and isinstance(error, KeyboardInterrupt):
                raise
            if not self._abandoned:
                self.failures += 1
                self.error = describe_error(error)
                self._on_error(self, call, error)

    def _carry_out(self, call: Call) -> None:
        if call.method == "start":
            made = self._make()
            made.start()
            self.tracker = made
            self.state = made.state_dict()
        elif self.tracker is not None:
            # The values are shared with the other trackers.
            getattr(self.tracker, call.method)(*snapshot(call.args), **snapshot(dict(call.kwargs)))
            if call.method == "load_state_dict":
                self.state = self.tracker.state_dict()
        elif call.method != "finish":
            raise RuntimeError("the tracker did not start")


def describe_error(error: BaseException) -> str:
    """Return the class and the message of an error, even if reading its message raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as unreadable:
        return f"{type(error).__name__} (its message cannot be read: {type(unreadable).__name__})"


OnError = Callable[[TrackerQueue, Call, BaseException], None]
