"""The line of the user's program that an operation was called from."""

import threading

import pytest

from accel_core.process import callsite


def _called_in(package: str, call: object) -> str:
    """Call in a function of a module of that name."""
    names = {"__name__": package, "call": call}
    exec(compile("def go():\n    return call()\n", f"<{package}>", "exec"), names)
    found: str = names["go"]()  # type: ignore[operator]
    return found


@pytest.mark.parametrize("package", ["accel_core.comm", "torch.utils"])
def test_the_line_is_the_innermost_of_the_program(package: str) -> None:
    """Lines of accel and torch are passed over, and no other ones."""
    assert _called_in("user_program", callsite.find) == "<user_program>:2 in go"
    assert _called_in(package, callsite.find).endswith(" in _called_in")


def test_another_thread_is_found() -> None:
    """The line of a thread that is waiting is given, and none of one that has ended."""
    begun, ends = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        ends.wait()

    other = threading.Thread(target=wait)
    other.start()
    begun.wait()
    assert "threading.py" in callsite.find(other.ident)
    ends.set()
    other.join()
    assert callsite.find(other.ident) == "an unknown line"
