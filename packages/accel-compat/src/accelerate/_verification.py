"""Decorators that make functions of the user's check, and name themselves, where ranks do not agree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from accel_core.comm.control import Channel
from accel_core.comm.disagreement import disagreement_message
from accel_core.comm.tree import view_of
from accel_core.errors import RankDisagreementError, RankView
from accel_core.process import callsite
from accel_core.process.world import ensure

_F = TypeVar("_F", bound=Callable[..., Any])

DistributedOperationException = RankDisagreementError


def verify_operation(function: _F) -> _F:
    """Make a function check, in debug mode, that all ranks call it with tensors of the same shapes and dtypes."""

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> Any:
        world = ensure()
        if world.debug and world.size > 1:  # comparing costs an exchange for every call
            nest = kwargs["tensor"] if "tensor" in kwargs else args[0]  # as Accelerate finds it
            name = f"{function.__module__}.{function.__qualname__}"
            view = RankView(name, callsite.find(), view_of(nest))
            views = Channel(world, name).exchange(view)
            if any(other.parts != view.parts for other in views):
                raise RankDisagreementError(disagreement_message(views))
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def chained_operation(function: _F) -> _F:
    """Make a disagreement inside a function name that function too, as the one that the user called."""

    @functools.wraps(function)
    def named(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except RankDisagreementError as failure:
            raise RankDisagreementError(
                f"{function.__module__}.{function.__qualname__} was called with data that differs between ranks.\n"
                f"{failure}"
            ) from failure

    return named  # type: ignore[return-value]
