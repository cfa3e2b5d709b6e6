"""Functions of engines that are not built keep their signature and raise when they are called."""

import inspect

import pytest

from accel_core.errors import EngineUnavailableError
from accelerate import _engines

NAMES = sorted(
    name
    for name, value in vars(_engines).items()
    if getattr(value, "__module__", None) == _engines.__name__ and not name.startswith("_")
)


def _arguments(callable_: object) -> dict[str, object]:
    parameters = inspect.signature(callable_).parameters.values()  # type: ignore[arg-type]
    required = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return {one.name: object() for one in required}


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_refused_by_name(name: str) -> None:
    """Calling one names itself and its engine; it never does something else instead."""
    function = getattr(_engines, name)
    with pytest.raises(EngineUnavailableError, match=name):
        function(**_arguments(function))


def test_the_list_is_short() -> None:
    """No more than these stand for engines to come."""
    assert len(NAMES) <= 17
