"""Whole checkpoints of models that FSDP1 wraps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from accel_core.checkpoint import model as models_of
from accel_core.checkpoint import optimizer as optimizers_of
from accel_core.checkpoint.format import Run, Source
from accel_core.checkpoint.report import Restoration
from accel_core.strategies.sharding.format import WholeFormat

__all__ = ["WrappedFormat"]


class _Owner(Protocol):
    """What gathers and shares out whole states; every rank calls each method."""

    def whole_state(self, model: torch.nn.Module, *, keep: bool) -> dict[str, Any]: ...

    def load_whole_state(self, model: torch.nn.Module, state: dict[str, Any]) -> None: ...

    def whole_optimizer(self, optimizer: Any, keep: bool) -> dict[str, Any]: ...

    def whole_groups(self, optimizer: Any) -> list[dict[str, Any]]: ...

    def load_whole_optimizer(self, optimizer: Any, state: dict[str, Any]) -> None: ...


class WrappedFormat(WholeFormat):
    """Whole models and optimizers, which are compared whole too: a piece has neither the name nor the shape.

    Args:
        kind: The layout of checkpoints that the plugin names.
        owner: Gathers and shares out.
    """

    def __init__(self, kind: str, owner: _Owner) -> None:
        super().__init__(kind, owner.whole_optimizer)
        self._owner = owner

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare with the models, changing nothing, and return how each is restored."""
        return [self._model(own, index, source, run.world.rank) for index, own in enumerate(models)]

    def _model(self, own: Any, index: int, source: Source, rank: int) -> Restoration:
        whole = _Whole(self._owner.whole_state(own, keep=True))
        plan = models_of.restoration(whole, index, source, rank)

        def apply() -> None:
            plan.apply()
            self._owner.load_whole_state(own, whole.state)

        return replace(plan, apply=apply)

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare with the optimizers, changing nothing, and return how each is restored."""
        found: list[Restoration] = []
        for index, own in enumerate(run.optimizers):
            stand = _Stand(self._owner.whole_groups(own), partial(self._owner.load_whole_optimizer, own))
            found.append(optimizers_of.restoration(stand, index, source, run.world.rank))
        return found


class _Whole(torch.nn.Module):
    """Stands for a model with a state that is whole."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:  # type: ignore[override]
        return self.state

    def load_state_dict(self, state_dict: Any, *args: object, **kwargs: object) -> Any:
        self.state.update(state_dict)


class _Stand:
    """Stands for an optimizer whose parameters are whole."""

    def __init__(self, groups: list[dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        self.param_groups = groups
        self.state: dict[Any, Any] = {}
        self.load_state_dict = load
