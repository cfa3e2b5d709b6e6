"""The line of the user's program that an operation was called from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

__all__ = ["find", "of_thread", "show_program_alone"]

_OURS = {
    *("accel_core", "accel_deepspeed", "accel_megatron", "accel_parallel", "accel", "accelerate", "torch"),
    *("contextlib", "functools"),
}


def find(frame: FrameType | None = None) -> str:
    """Return the innermost line outside accel and torch, as `file:line in function`."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame) or frame.f_back is None:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def show_program_alone(failure: BaseException) -> None:
    """Have an error that ends the process printed with the lines of the user's program, without those of accel."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is failure:
            shown: TracebackType | None = None
            for at in reversed(list(_steps(trace))):
                if not _is_ours(at.tb_frame):
                    shown = TracebackType(shown, at.tb_frame, at.tb_lasti, at.tb_lineno)
            trace = shown or trace
            error.__traceback__ = trace
        before(kind, error, trace)

    sys.excepthook = show


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def of_thread(ident: int) -> str:
    """Return the line at which another thread of this process is now."""
    frame = sys._current_frames().get(ident)
    return "an unknown line" if frame is None else find(frame)
