"""The line of the user's program that an operation was called from."""

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
