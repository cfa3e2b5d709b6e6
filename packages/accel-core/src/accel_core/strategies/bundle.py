"""The objects of one `prepare` call, sorted by what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from accel_core._records import record
from accel_core.errors import PreparationError
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler

Kind = Literal["models", "optimizers", "loaders", "schedulers"]
"""The kinds of objects that a strategy prepares, by the names of a bundle's lists."""


@record
class Slot:
    """One object passed to `prepare`, whether it is moved to the device (`None`: as the run says), and its result."""

    given: Any
    place: bool | None
    result: Any


@record
class Bundle:
    """The slots of one `prepare` call: all in the caller's order, and again by kind."""

    slots: list[Slot] = field(default_factory=list)
    models: list[Slot] = field(default_factory=list)
    optimizers: list[Slot] = field(default_factory=list)
    schedulers: list[Slot] = field(default_factory=list)
    loaders: list[Slot] = field(default_factory=list)

    @classmethod
    def sort(
        cls,
        objects: Sequence[Any],
        placement: Sequence[bool | None] | None,
        own: Callable[[Any], Kind | None] | None = None,
    ) -> Bundle:
        """Sort objects by kind; an object of none of the four kinds passes through unchanged."""
        if placement is not None and len(placement) != len(objects):
            raise PreparationError(
                f"device_placement needs one entry for each object; got {len(placement)} for {len(objects)} objects. "
                "Pass a list of True, False or None of the same length, or leave it out."
            )
        bundle = cls()
        for index, given in enumerate(objects):
            slot = Slot(given, None if placement is None else placement[index], given)
            bundle.slots.append(slot)
            kind = (None if own is None else own(given)) or kind_of(given)
            if kind is not None:
                by_kind: list[Slot] = getattr(bundle, kind)
                by_kind.append(slot)
        return bundle

    @property
    def recognised(self) -> list[Slot]:
        """The slots of the four kinds, kind by kind."""
        return [*self.models, *self.optimizers, *self.loaders, *self.schedulers]

    @property
    def others(self) -> list[Slot]:
        """The slots of none of the four kinds."""
        known = {id(slot) for slot in self.recognised}
        return [slot for slot in self.slots if id(slot) not in known]

    @property
    def results(self) -> tuple[Any, ...]:
        """What the caller gets back, in the order of the objects passed."""
        return tuple(slot.result for slot in self.slots)


def kind_of(given: object) -> Kind | None:
    """Return which of the four kinds an object has for every strategy, or `None`."""
    if isinstance(given, torch.nn.Module):
        return "models"
    if isinstance(given, torch.optim.Optimizer | AcceleratedOptimizer):
        return "optimizers"
    if isinstance(given, DataLoader):
        return "loaders"
    is_schedule = isinstance(given, torch.optim.lr_scheduler.LRScheduler | AcceleratedScheduler)
    return "schedulers" if is_schedule or _steps_like_a_schedule(given) else None


def _steps_like_a_schedule(given: object) -> bool:
    """Return whether an object is a schedule by its looks: it steps, knows its rates, and belongs to an optimizer."""
    return (
        not isinstance(given, type)
        and callable(getattr(given, "step", None))
        and hasattr(given, "optimizer")
        and (hasattr(given, "get_last_lr") or hasattr(given, "get_lr") or hasattr(given, "num_bad_epochs"))
    )
