"""Trackers of ranks and runs that do not track: the same attributes, and nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accel_core.tracking.tracker import GeneralTracker

__all__ = ["NULL_RUN", "NullRun", "null_tracker"]


class NullRun:
    """Stands for a library's run where none is open: every call and attribute of it is itself."""

    def __getattr__(self, name: str) -> NullRun:
        if name.startswith("__"):  # copies, pickles and protocols must find no methods here
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        return None

    def __call__(self, *_args: object, **_kwargs: object) -> NullRun:
        """Take any call."""
        return self

    def __getitem__(self, key: object) -> NullRun:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        return None

    def __iter__(self) -> Iterator[NullRun]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> NullRun:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __repr__(self) -> str:
        return "NullRun()"


NULL_RUN = NullRun()
"""The one instance that null trackers give."""


class _Null:
    """First base of every null tracker: answers for what the class does not name."""

    def __init__(self) -> None:
        return None

    def __getattr__(self, name: str) -> NullRun:
        if name.startswith("__"):
            raise AttributeError(name)
        return NULL_RUN

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: does nothing>"


def null_tracker(like: type[GeneralTracker] | GeneralTracker) -> GeneralTracker:
    """Make a tracker that is an instance of the same class, and does nothing."""
    kind = like if isinstance(like, type) else type(like)
    members: dict[str, Any] = {}
    for name in dir(kind):
        if name.startswith("_") or hasattr(object, name):
            continue
        found = getattr(kind, name)
        if callable(found):
            members[name] = _no_operation(name)
        elif isinstance(found, property):
            members[name] = property(lambda _self: NULL_RUN)
    members["state_dict"] = lambda _self: {}
    name = getattr(like, "name", kind.__name__)
    if isinstance(name, str):
        members["name"] = name
    made = type(kind.__name__, (_Null, kind), members)
    null: GeneralTracker = made()
    return null


def _no_operation(name: str) -> Callable[..., None]:
    def do_nothing(_self: object, *_args: object, **_kwargs: object) -> None:
        return None

    do_nothing.__name__ = name
    return do_nothing
