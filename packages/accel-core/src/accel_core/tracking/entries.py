"""What a logging call becomes: an entry of the spool, and from it a call of each tracker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from accel_core.tracking.delivery import Call
from accel_core.tracking.flatten import as_scalar

__all__ = ["call_of", "log_arguments", "whole_step"]

logger = logging.getLogger(__name__)


def call_of(entry: Mapping[str, Any], tracker: str, fills_step: bool) -> Call:
    """Return the call that brings a spool entry to a tracker.

    Args:
        entry: An entry as written, or as `spool.read` gives it.
        tracker: The tracker's name.
        fills_step: Whether the tracker wants the filled-in step.
    """
    if entry["kind"] == "config":
        return Call("store_init_configuration", (entry["values"],), seq=entry["seq"])
    if entry["kind"] == "log":
        step = entry["filled"] if fills_step else entry["step"]
        kwargs = {"step": step, **entry["kwargs"].get(tracker, {})}
        return Call("log", (entry["values"],), kwargs, seq=entry["seq"])
    return Call(entry["method"], tuple(entry["args"]), dict(entry["kwargs"]), seq=entry["seq"])


def log_arguments(
    values: Mapping[str, Any], step: Any = None, **kwargs: Any
) -> tuple[Mapping[str, Any], Any, dict[str, Any]]:
    """Take the arguments of a tracker's `log` apart: the values, the step, and what is for the library."""
    return values, step, kwargs


def whole_step(step: Any) -> int | None:
    """Read a step as a whole number, and `None`, with a warning, where it is none."""
    number = as_scalar(step)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if step is None or isinstance(number, int):
        return None if step is None else int(number)  # type: ignore[arg-type]
    logger.warning("A step is a whole number; got %r. The values are logged without it.", step)
    return None
