"""What a run holds of a tracker: the tracker's own face, with every logging call taken through the hub."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from accel_core.tracking.delivery import Delivery
from accel_core.tracking.null import NOTHING
from accel_core.tracking.tracker import GeneralTracker

__all__ = ["QUEUED", "TrackerHandle"]

QUEUED = frozenset(
    {"log", "log_artifact", "log_artifacts", "log_figure", "log_images", "log_table", "store_init_configuration"}
)
"""Methods that are queued, recorded and guarded."""

_OWN = frozenset({"_delivery", "_kind", "_queued", "_real", "_send", "_settle", "name", "tracker"})
_FACTS = frozenset({"fills_step", "libraries", "main_process_only", "requires_logging_directory", "starts_on_caller"})


class Sender(Protocol):
    """How a handle gives a call to its hub."""

    def __call__(self, tracker: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Queue a call of one tracker."""


class TrackerHandle(GeneralTracker):
    """Stands for a tracker in `accelerator.trackers`.

    It is an instance of the tracker's class to `isinstance`, and gives and takes all its attributes. The methods in
    `QUEUED` return at once; everything else waits a moment for what was queued before it.

    Args:
        delivery: The tracker's thread.
        kind: The tracker's class.
        send: The hub's way in.
        settle: Waits a moment until what was queued has been called.
    """

    def __init__(
        self, delivery: Delivery, kind: type[GeneralTracker], send: Sender, settle: Callable[[Delivery], None]
    ) -> None:
        super().__init__(_blank=True)
        own = vars(self)
        own["_delivery"] = delivery
        own["_kind"] = kind
        own["_send"] = send
        own["_settle"] = settle

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return vars(self)["_kind"]  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The tracker's name."""
        delivery: Delivery = self._delivery
        return delivery.name

    @property
    def tracker(self) -> Any:
        """The library's own run object, waiting until it is there; `NOTHING` where the tracker did not start."""
        found = self._real()
        return NOTHING if found is None else found.tracker

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            return super().__getattribute__(name)
        kind = super().__getattribute__("_kind")
        if name in QUEUED and hasattr(kind, name):
            return self._queued(name, getattr(kind, name))
        if name in _FACTS and hasattr(kind, name):
            return getattr(kind, name)
        found = self._real()
        if found is not None:
            return getattr(found, name)
        if hasattr(kind, name):
            return NOTHING
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        found = self._real()
        if found is not None:
            setattr(found, name, value)

    def __repr__(self) -> str:
        return f"<{self._kind.__name__} {self.name!r} behind its queue>"

    def _real(self) -> GeneralTracker | None:
        delivery: Delivery = self._delivery
        self._settle(delivery)
        return delivery.tracker

    def _queued(self, name: str, like: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(like)
        def send(*args: Any, **kwargs: Any) -> None:
            self._send(self.name, name, args, kwargs)

        return send
