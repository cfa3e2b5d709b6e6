"""One tracker in a run: made, started, called and counted in a thread of its own."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

from accel_core._records import record
from accel_core.tracking.snapshot import snapshot
from accel_core.tracking.tracker import GeneralTracker
from accel_core.tracking.worker import TrackerWorker

__all__ = ["Call", "OnOutcome", "TrackerSession", "describe_error"]


@record(frozen=True)
class Call:
    """One call of a tracker."""

    method: str  # name of the tracker's method
    args: tuple[Any, ...] = ()  # positional arguments
    kwargs: dict[str, Any] | None = None  # keyword arguments
    seq: int | None = None  # number of the entry that it brings, or `None` for calls that are not entries

    @classmethod
    def of(cls, entry: Mapping[str, Any], tracker: str, fills_step: bool) -> Call:
        """Return the call that brings an entry to a tracker."""
        if entry["kind"] == "config":
            return cls("store_init_configuration", (entry["values"],), seq=entry["seq"])
        if entry["kind"] == "log":
            step = entry["filled"] if fills_step else entry["step"]
            kwargs = {"step": step, **entry["kwargs"].get(tracker, {})}
            return cls("log", (entry["values"],), kwargs, seq=entry["seq"])
        return cls(entry["method"], tuple(entry["args"]), dict(entry["kwargs"]), seq=entry["seq"])


class TrackerSession:
    """Makes a tracker and calls it, all in one thread, in the order of `put`.

    Attributes:
        tracker: The tracker, once it has started.
        state: What the tracker stores of its run.
        unsent: The numbers of the entries that it has not taken.
        failures: How many calls raised.
        error: The last error, as text.
        switched_off: Whether it gets no more entries.
        dropped: How many calls found its queue full.
    """

    def __init__(
        self, name: str, kind: type[GeneralTracker], make: Callable[[], GeneralTracker], on_outcome: OnOutcome
    ) -> None:
        self.name = name
        self.kind = kind
        self.tracker: GeneralTracker | None = None
        self.state: dict[str, Any] = {}
        self.unsent: set[int] = set()
        self.failures = 0
        self.error: str | None = None
        self.switched_off = False
        self.dropped = 0
        self._make = make
        self._on_outcome = on_outcome
        # Libraries keep their run in context variables, which a new thread does not have.
        self._context = contextvars.copy_context()
        self._worker = TrackerWorker(f"tracker-{name}")

    def start(self) -> None:
        """Make and start the tracker, in the thread where its library wants to be started."""
        if self.kind.starts_on_caller:
            self.call(Call("start"), on_caller=True)
        else:
            self.put(Call("start"))

    def put(self, call: Call) -> bool:
        """Queue a call."""
        if call.seq is not None:
            self.unsent.add(call.seq)
        taken = self._worker.put(lambda: self.call(call))
        self.dropped += not taken
        return taken

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is queued or running."""
        return self._worker.drain(seconds)

    def finish(self) -> None:
        """Queue the tracker's end; it takes no other call after that."""
        self._worker.finish(lambda: self.call(Call("finish")))

    def close(self, seconds: float) -> bool:
        """Wait for the end that `finish` queued."""
        done = self._worker.close(seconds)
        if done and self.tracker is not None and self.kind.starts_on_caller:
            self.call(Call("release"), on_caller=True)
        return done

    def call(self, call: Call, on_caller: bool = False) -> None:
        """Make a call in this thread, and report its outcome."""
        error: BaseException | None = None
        try:
            self._context.run(self._carry_out, call)
        # A tracker must not end its thread or the run, so SystemExit and the like count as failures. Only in the user's
        # own thread is KeyboardInterrupt raised again: there it may be the user's Ctrl-C.
        except KeyboardInterrupt as interrupt:
            if on_caller:
                raise
            error = interrupt
        except BaseException as raised:
            error = raised
        self._on_outcome(self, call, error)

    def _carry_out(self, call: Call) -> None:
        if call.method == "start":
            made = self._make()
            made.start()
            self.tracker = made
            self.state = made.state_dict()
        elif self.tracker is not None:
            # The entry is shared with the other trackers and with the recorder, which may be writing it right now.
            getattr(self.tracker, call.method)(*snapshot(call.args), **snapshot(call.kwargs or {}))
            if call.method == "load_state_dict":
                self.state = self.tracker.state_dict()
        elif call.method not in ("finish", "release"):
            raise RuntimeError("the tracker did not start")

    def adopt_context(self) -> None:
        """Give the calling thread the context variables that the library set when it started, such as its run."""
        missing = object()
        for variable, value in self._context.items():
            if variable.get(missing) is not value:
                variable.set(value)


def describe_error(error: BaseException) -> str:
    """Return the class and the message of an error, even if reading its message raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as unreadable:
        return f"{type(error).__name__} (its message cannot be read: {type(unreadable).__name__})"


OnOutcome = Callable[[TrackerSession, Call, BaseException | None], None]
