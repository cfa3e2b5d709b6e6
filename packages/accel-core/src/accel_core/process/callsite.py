"""The line of the user's program that an operation was called from."""

from __future__ import annotations

import sys
import threading
import traceback

_OURS = {
    *("accel_core", "accel_deepspeed", "accel_megatron", "accel_parallel", "accel", "accelerate", "torch"),
    *("contextlib", "functools"),
}


def find(thread: int | None = None) -> str:
    """Return the innermost line outside accel and torch, of this thread or another, as `file:line in function`."""
    place = "an unknown line"
    frame = sys._current_frames().get(threading.get_ident() if thread is None else thread)
    for at, line in traceback.walk_stack(frame) if frame is not None else ():
        place = f"{at.f_code.co_filename}:{line} in {at.f_code.co_name}"
        if str(at.f_globals.get("__name__", "")).partition(".")[0] not in _OURS:
            break
    return place
