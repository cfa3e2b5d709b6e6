"""The line of the user's program that an operation was called from."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["find", "of_thread"]

_OURS = {
    *("accel_core", "accel_deepspeed", "accel_megatron", "accel_parallel", "accel", "accelerate", "torch"),
    *("contextlib", "functools"),
}


def find(frame: FrameType | None = None) -> str:
    """Return the innermost line outside of accel and torch, as `file:line in function`."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OURS or frame.f_back is None:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def of_thread(ident: int) -> str:
    """Return the line at which another thread of this process is now."""
    frame = sys._current_frames().get(ident)
    return "an unknown line" if frame is None else find(frame)
