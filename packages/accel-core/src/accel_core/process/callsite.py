"""The line of the user's program that an operation was called from."""

from __future__ import annotations

import sys

__all__ = ["find"]

_OURS = ("accel_core", "accel", "accelerate", "torch", "contextlib", "functools")


def find() -> str:
    """Return the innermost line outside of accel and torch, as `file:line in function`."""
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OURS or frame.f_back is None:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"
