"""Gradient scalers: made by the label of a run, and undone before gradients are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel_core.mesh.tensor import local_part
from accel_core.options.enums import DistributedType
from accel_core.options.hardware import HARDWARE
from accel_core.process import world

_DEVICES: dict[DistributedType, str] = {row.label: row.name for row in HARDWARE if row.label is not DistributedType.NO}

_UNSCALED, _STEPPED = 1, 2  # of torch's `OptState`


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Create the gradient scaler of fp16 training."""
    device = None if distributed_type is None else _DEVICES.get(distributed_type)
    return torch.amp.GradScaler(device or world.ensure().device.type, **kwargs)


def _states(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Return what a scaler knows of optimizers since their last step; one that is switched off knows nothing."""
    return scaler._per_optimizer_states if scaler.is_enabled() else {}


def adapt(scaler: torch.amp.GradScaler, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Adapt the scale to the steps since it last was; given optimizers, once all of them have stepped.

    Until then gradients of the others are multiplied by the scale as it is, and may be divided by it already.
    """
    states = _states(scaler)
    stepped = {key for key, state in states.items() if state["stage"].value == _STEPPED}
    if stepped and stepped.issuperset(map(id, optimizers)):
        scaler.update()


@torch.no_grad()
def begin(scaler: torch.amp.GradScaler, optimizers: Iterable[torch.optim.Optimizer], *, adapts: bool) -> None:
    """Make ready for a loss: its gradients are added to ones that have the scale, or have it again."""
    states = _states(scaler)
    unscaled = [each for each in optimizers if id(each) in states and states[id(each)]["stage"].value == _UNSCALED]
    if adapts and unscaled:  # a step that its loop left out counts too
        scaler.update()
    elif adapts:
        adapt(scaler)
    for optimizer in unscaled:
        states.pop(id(optimizer))
        scale = scaler.get_scale()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(scale)


def forget(scaler: torch.amp.GradScaler) -> None:
    """Adapt the scale, and forget the optimizers: others may get their identities."""
    adapt(scaler)
    _states(scaler).clear()


def unscale(scaler: torch.amp.GradScaler, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Divide the gradients of optimizers by the scale, unless that was done since their last step."""
    together = hasattr(scaler, "process_group")  # all ranks unscale, also what some have no part of
    for optimizer in optimizers if scaler.is_enabled() else ():
        # torch raises at a second call for the same step, and tells only here whether there was a first.
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"].value
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if stage != _UNSCALED and (has_gradients or together):
            states = scaler._per_optimizer_states
            if stage == _STEPPED:  # torch refuses it; an overflow in that step counts still
                states[-id(optimizer)] = states.pop(id(optimizer))
            scaler.unscale_(optimizer)
