"""Which lines of a program are shown where an error of accel ends it."""

import sys
import traceback
from types import TracebackType

import pytest

from accel_core.process import callsite


def _raise_in(package: str, call: object) -> None:
    """Go through a function of a module of that name."""
    names = {"__name__": package, "call": call}
    exec(compile("def go():\n    call()\n", f"<{package}>", "exec"), names)
    names["go"]()  # type: ignore[operator]


def _fail() -> None:
    raise ValueError("lost")


@pytest.mark.parametrize("own", ["accel_core.comm", "torch.utils", "user_program"])
def test_an_uncaught_error_shows_the_program_alone(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the marked error the lines of accel and torch are left out; of another one all are printed."""
    printed: list[list[str]] = []

    def before(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        printed.append([frame.name for frame in traceback.extract_tb(trace)])

    monkeypatch.setattr(sys, "excepthook", before)
    for marked in (True, False):
        with pytest.raises(ValueError, match="lost") as caught:
            _raise_in("user_program", lambda: _raise_in(own, _fail))
        if marked:
            callsite.show_program_alone(caught.value)
        sys.excepthook(ValueError, caught.value, caught.value.__traceback__)
    short, whole = printed
    assert len(whole) - len(short) == (own != "user_program")
    assert short[-1] == whole[-1] == "_fail"
