"""What a run holds of a tracker: the tracker's own face, with every logging call taken through the hub."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from accel_core.tracking.queues import QUEUED, TrackerQueue
from accel_core.tracking.tracker import GeneralTracker

_FACTS = frozenset({"fills_step", "libraries", "main_process_only", "requires_logging_directory", "starts_on_caller"})


Sender = Callable[[TrackerQueue, str, tuple[Any, ...], dict[str, Any]], None]
"""Takes a call of one tracker: the tracker, the method, its arguments."""


class NullRun:
    """Stands for a library's run where none is open: every call and attribute of it is itself."""

    def __getattr__(self, name: str) -> NullRun:
        if name.startswith("__"):  # copies, pickles and protocols must find no methods here
            raise AttributeError(name)
        return self

    def __call__(self, *_args: object, **_kwargs: object) -> NullRun:
        """Take any call."""
        return self

    __getitem__ = __enter__ = __call__

    def __setattr__(self, *_: object) -> None:
        return None

    __setitem__ = __exit__ = __setattr__

    def __iter__(self) -> Iterator[NullRun]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "NullRun()"


NULL_RUN = NullRun()
"""The one instance that null trackers give."""


def do_nothing(*_args: object, **_kwargs: object) -> None:
    """Take any call."""


class TrackerHandle:
    """Stands for a tracker in `accelerator.trackers`.

    It is an instance of the tracker's class to `isinstance`, and gives and takes all its attributes. The methods in
    `QUEUED` return at once; everything else waits a moment for what was queued before it.
    """

    def __init__(self, queue: TrackerQueue, send: Sender, deliver: Callable[[TrackerQueue], None]) -> None:
        # Past `__setattr__`, which sets attributes of the tracker.
        vars(self).update(_queue=queue, _kind=queue.kind, _send=send, _deliver=deliver)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return vars(self)["_kind"]  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The tracker's name."""
        queue: TrackerQueue = self._queue
        return queue.name

    @property
    def tracker(self) -> Any:
        """The library's own run object, waiting until it is there; `NULL_RUN` where the tracker did not start."""
        found = self._real()
        return NULL_RUN if found is None else found.tracker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = vars(self)["_kind"]
        if name in QUEUED and hasattr(kind, name):
            return self._queued(name, getattr(kind, name))
        if name in _FACTS and hasattr(kind, name):
            return getattr(kind, name)
        found = self._real()
        if found is not None:
            return getattr(found, name)
        return do_nothing if callable(getattr(kind, name, None)) else NULL_RUN

    def __setattr__(self, name: str, value: object) -> None:
        found = self._real()
        if found is not None:
            setattr(found, name, value)

    def __repr__(self) -> str:
        return f"<{self._kind.__name__} {self.name!r}>"

    def _real(self) -> GeneralTracker | None:
        queue: TrackerQueue = self._queue
        self._deliver(queue)
        return queue.tracker

    def _queued(self, name: str, like: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(like)
        def send(*args: object, **kwargs: object) -> None:
            self._send(self._queue, name, args, kwargs)

        return send


class _NoQueue(NamedTuple):
    name: str
    kind: type[GeneralTracker]
    tracker: None = None


def null_tracker(like: type[GeneralTracker] | GeneralTracker) -> GeneralTracker:
    """Return a tracker of the same class and name whose methods and attributes do nothing."""
    kind = like if isinstance(like, type) else type(like)
    name = getattr(like, "name", None)
    queue: Any = _NoQueue(name if isinstance(name, str) else kind.__name__, kind)
    return cast(GeneralTracker, TrackerHandle(queue, do_nothing, do_nothing))
