"""Models without weights: parameters created on the meta device, or on any device, in this thread only."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from accel_bigmodel._torch import make_subclass
from accel_core.host import environ
from accel_core.modules import packed


@dataclass(eq=False)
class _Placement:
    """Where the modules that this thread builds put their tensors."""

    device: torch.device
    unfilled: list[nn.Parameter] = field(default_factory=list)
    noted: list[weakref.ref[nn.Parameter]] = field(default_factory=list)


_IGNORING = ("normal_", "uniform_", "__getstate__")


class _Active(threading.local):
    """The placements this thread has entered, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Placement] = []


_active = _Active()


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models whose parameters are on the meta device: they have shapes and dtypes, and take no memory.

    Ties are kept: a parameter registered twice stays one parameter. Other threads build their models as usual.

    Args:
        include_buffers: Whether buffers are empty too. By default the environment's
            `ACCELERATE_INIT_INCLUDE_BUFFERS`, and else no: buffers keep their values.

    Yields:
        Nothing.

    Examples:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(1_000, 1_000)
        >>> model.weight.device
        device(type='meta')
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models whose parameters are created on a device.

    Args:
        device: The device.
        include_buffers: Whether buffers are created there too. By default the environment's
            `ACCELERATE_INIT_INCLUDE_BUFFERS`, and else no: buffers stay where the model's code puts them.

    Yields:
        Nothing.

    Examples:
        >>> with init_on_device("meta"):
        ...     model = Net()
        >>> model.head.weight.device
        device(type='meta')
    """
    if include_buffers is None:
        include_buffers = environ.flag("ACCELERATE_INIT_INCLUDE_BUFFERS", default=False)
    place = torch.device(device)
    if include_buffers:
        with place, _registering(_Placement(place)):
            yield
    else:
        with _registering(_Placement(place)):
            yield


@contextlib.contextmanager
def _registering(placement: _Placement) -> Iterator[None]:
    """Move the parameters that this thread registers to a device."""
    _watch_modules()
    _active.stack.append(placement)
    try:
        yield
    finally:
        _active.stack.remove(placement)
        for parameter in placement.unfilled:
            for name in _IGNORING:
                parameter.__dict__.pop(name, None)
        for reference in placement.noted:
            left = reference()
            if left is not None:
                left.__dict__.pop("_accel_moved", None)


@functools.cache
def _watch_modules() -> None:
    """Have torch show each parameter that a module gets; without a placement on its thread nothing is done."""
    nn_module.register_module_parameter_registration_hook(cast(Any, _place_parameter))


def _place_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return the parameter to register instead; None registers it as it is (torch's registration hook)."""
    stack = _active.stack
    if not stack or parameter is None:
        return None
    placement = stack[-1]
    device = placement.device
    present = parameter.device
    if present == device or (device.index is None and present.type == device.type):
        _leave_unfilled(parameter, placement)
        return None
    # Noted on the parameter itself until the placement ends: it may be registered again, or be dropped at once.
    known: tuple[_Placement, nn.Parameter] | None = parameter.__dict__.get("_accel_moved")
    if known is not None and known[0] is placement:
        return known[1]
    moved = _moved(parameter, device)
    parameter.__dict__["_accel_moved"] = (placement, moved)
    placement.noted.append(weakref.ref(parameter))
    _leave_unfilled(moved, placement)
    return moved


def _leave_unfilled(parameter: nn.Parameter, placement: _Placement) -> None:
    """Make an empty parameter ignore random initializers, whose numbers are never seen, until the placement ends."""
    if type(parameter) is nn.Parameter and parameter.is_meta:
        # Its own attributes stand before the methods of its class: another class could not be wrapped in
        # `nn.Parameter`.
        own = parameter.__dict__
        own["normal_"] = own["uniform_"] = functools.partial(_itself, parameter)
        own["__getstate__"] = functools.partial(own_attributes, parameter)  # what torch pickles
        placement.unfilled.append(parameter)


def _itself(parameter: nn.Parameter, *_args: object, **_kwargs: object) -> nn.Parameter:
    return parameter


def own_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor that do not come from a placement."""
    left_out = (*_IGNORING, "_accel_moved")
    return {name: value for name, value in vars(parameter).items() if name not in left_out}


def as_parameter(cls: type[torch.Tensor], data: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of a class of data that is where it has to be."""
    if cls is nn.Parameter:
        return nn.Parameter(data, requires_grad)
    return cast(nn.Parameter, make_subclass(cls, data, requires_grad))


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Make the same parameter on another device: class, `requires_grad` and attributes are kept."""
    form = packed.find(parameter)
    if form is not None:
        moved = form.move(parameter, device)
    else:
        plain = type(parameter) is nn.Parameter and device.type == "meta"
        data = torch.empty_like(parameter, device=device) if plain else parameter.detach().to(device)
        moved = as_parameter(type(parameter), data, parameter.requires_grad)
    moved.__dict__.update(own_attributes(parameter))
    return moved
