"""Classes whose constructor is compiled when it is first used behave as the standard dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from accel_core._records import record


@record
class Open:
    """One that can be changed."""

    option_prefix: ClassVar[str] = "open_"

    size: int
    parts: list[int] = dataclasses.field(default_factory=list)
    late: int = dataclasses.field(default=4, kw_only=True)
    held: int = dataclasses.field(default=5, init=False)

    def __post_init__(self) -> None:
        self.held += self.size


@record
class Wider(Open):
    """One with a field more."""

    more: str = "m"


@record(frozen=True)
class Frozen:
    """One that cannot be changed."""

    size: int
    other: str = "o"


@record(frozen=True)
class FrozenWider(Frozen):
    """One with a field more that cannot be changed."""

    more: int = 1


class Loose(Frozen):
    """A plain subclass, which has attributes of its own."""


class Overriding(Frozen):
    """A plain subclass that hands what it is asked to set and to delete on to the frozen one."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)


@dataclasses.dataclass(frozen=True)
class Standard:
    """What the standard decorator makes of the same fields as `Frozen`."""

    size: int
    other: str = "o"


@dataclasses.dataclass
class Subclass(Open):
    """A standard dataclass over a record."""

    own: int = 7


def test_the_signature_and_the_fields_are_those_of_a_dataclass() -> None:
    """Order, defaults, keywords, inherited fields and annotations are there before any instance is made."""
    assert str(inspect.signature(Wider)) == (
        "(size: 'int', parts: 'list[int]' = <factory>, more: 'str' = 'm', *, late: 'int' = 4) -> None"
    )
    assert str(inspect.signature(Frozen)) == str(inspect.signature(Standard))
    assert [field.name for field in dataclasses.fields(Wider)] == ["size", "parts", "late", "held", "more"]
    assert typing.get_type_hints(Frozen.__init__) == {"size": int, "other": str, "return": type(None)}
    assert Frozen.__init__.__qualname__ == "Frozen.__init__"


def test_instances_are_made_compared_copied_and_pickled() -> None:
    """Factories make a new value each time, `__post_init__` runs, and copies and pickles are equal."""
    one, two = Open(1), Open(1, late=9)
    assert (one.parts == two.parts, one.parts is two.parts, one.held, two.late) == (True, False, 6, 9)
    assert Wider(1, [2], "x", late=3) == Wider(size=1, parts=[2], more="x", late=3) != Wider(1, [2])
    assert Subclass(1, [2], 3).own == 3
    for each in (two, Wider(2), Frozen(3), FrozenWider(3, more=2)):
        assert pickle.loads(pickle.dumps(each)) == copy.copy(each) == dataclasses.replace(each, size=each.size) == each
    assert hash(Frozen(3)) == hash(Frozen(3))
    with pytest.raises(TypeError, match=r"Frozen.__init__\(\) missing 1 required positional argument: 'size'"):
        Frozen()  # type: ignore[call-arg]


@pytest.mark.parametrize("made", [Frozen(1), FrozenWider(1), Standard(1)], ids=lambda made: type(made).__name__)
def test_a_frozen_one_cannot_be_changed(made: Frozen) -> None:
    """Setting any attribute is refused as the standard decorator refuses it, and nothing changes."""
    before = dict(vars(made))
    for name in ("size", "unknown"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"^cannot assign to field '{name}'$"):
            setattr(made, name, 2)
    assert vars(made) == before


@pytest.mark.parametrize("kind", [Loose, Overriding])
def test_a_plain_subclass_of_a_frozen_one_takes_attributes(kind: type[Frozen]) -> None:
    """As with the standard decorator, only the fields stay as they are; an open dataclass over it is refused."""
    loose: Any = kind(1)
    loose.mine = 2
    del loose.mine
    with pytest.raises(dataclasses.FrozenInstanceError):
        loose.size = 2
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Opened", (kind,), {"__annotations__": {}}))


def test_threads_make_the_first_instances_at_once() -> None:
    """Whichever thread is first, all get an instance, also of a class that was renamed before its first use."""
    for number in range(20):
        kind = record(frozen=True)(type("Late", (), {"__annotations__": {"size": "int"}, "__doc__": "Late."}))
        kind.__module__ = "another.module"
        with ThreadPoolExecutor(8) as pool:
            assert [made.size for made in pool.map(kind, [number] * 16)] == [number] * 16  # type: ignore[attr-defined]
