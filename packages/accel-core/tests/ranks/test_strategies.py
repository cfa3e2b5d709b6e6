"""The built-in strategies, and a toy that shares no code with them, against what every strategy has to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_core.mesh.layout import Layout
from accel_core.options.enums import DistributedType
from accel_core.strategies.ddp import DataParallelStrategy
from accel_core.strategies.parts import Clip, Parts
from accel_core.strategies.single import SingleStrategy
from accel_core.strategies.strategy import Strategy
from accel_testing.conformance.strategy import Case, StrategyConformance


class PairedStrategy(Strategy):
    """Two neighbors are one replica, as under tensor parallelism, and gradients lie outside `.grad`, as under ZeRO."""

    name = "paired"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.alone: dict[nn.Parameter, torch.Tensor] = {}
        self.together: dict[nn.Parameter, torch.Tensor] = {}
        self.held = False

    @classmethod
    def lay_out(cls, rank: int, world_size: int, parallelism: Any, plugin: Any) -> Layout:
        """Pair neighbors."""
        return Layout.of(rank, world_size, {"dp_replicate": world_size // 2, "tp": 2})

    def label(self) -> DistributedType:
        """Return the label of data parallel, for want of another."""
        return self.world.hardware.label

    def distribute(self, model: nn.Module) -> nn.Module:
        """Start everywhere from the weights of rank 0."""
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        return model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Take gradients away, and average what was collected unless that is put off."""
        super().backward(loss, **kwargs)
        for parameter in (p for group in self._groups() for p in group if p.grad is not None):
            self.alone[parameter] = self.alone.get(parameter, torch.zeros(())) + parameter.grad
            parameter.grad = None
        if not self.held and self.parts.accumulation.gradient_state.sync_gradients:
            for parameter, gradient in self.alone.items():
                dist.all_reduce(gradient)
                self.together[parameter] = self.together.get(parameter, torch.zeros(())) + gradient / self.world.size
            self.alone.clear()

    def prepare_model(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Remember the models whose gradients are taken."""
        self.models = [*getattr(self, "models", []), prepared := super().prepare_model(model, **kwargs)]
        return prepared

    def _groups(self) -> Iterator[list[nn.Parameter]]:
        for model in self.models:
            yield list(model.parameters())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Put averaging off."""
        return self._set_held(True)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Average again."""
        return self._set_held(False)

    @contextmanager
    def _set_held(self, held: bool) -> Iterator[None]:
        before, self.held = self.held, held
        try:
            yield
        finally:
            self.held = before

    def scale_gradients(self, factor: float, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Multiply what was averaged."""
        if not self.together:
            super().scale_gradients(factor, models, optimizers)
        for gradient in self.together.values():
            gradient.mul_(factor)

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Clip what was averaged, of all models together."""
        gradients = list(self.together.values())
        norm = nn.utils.get_total_norm(gradients, clip.norm_type)
        for gradient in gradients:
            gradient.mul_(torch.clamp(clip.limit / (norm + 1e-6), max=1.0))
        return norm

    def clip_grad_value_(self, clip: Clip) -> None:
        """Clip the elements of what was averaged."""
        for gradient in self.together.values():
            gradient.clamp_(-clip.limit, clip.limit)

    def stepper(self, optimizer: torch.optim.Optimizer) -> PairedStepper:
        """Step with what was averaged."""
        return PairedStepper(self, optimizer)


class PairedStepper:
    """Gives an optimizer the gradients that its strategy keeps."""

    step_was_skipped = False

    def __init__(self, strategy: PairedStrategy, optimizer: torch.optim.Optimizer) -> None:
        self.strategy = strategy
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Put the gradients into place for the step."""
        for parameter, gradient in self.strategy.together.items():
            parameter.grad = gradient
        result = self.optimizer.step(closure)
        self.optimizer.zero_grad()
        return result

    def zero_grad(self, set_to_none: bool | None) -> None:
        """Drop the gradients."""
        self.strategy.together.clear()


class TestSingle(StrategyConformance):
    """One process."""

    strategy = SingleStrategy
    sizes = (1,)


class TestDataParallel(StrategyConformance):
    """Data parallel."""

    strategy = DataParallelStrategy
    sizes = (2,)


@pytest.mark.full("another case of a grid")
class TestDataParallelOnFour(TestDataParallel):
    """The same on four ranks."""

    sizes = (4,)


class TestPaired(StrategyConformance):
    """A replica of two ranks, with gradients of its own."""

    strategy = PairedStrategy
    sizes = (4,)


@pytest.mark.full("another case of a grid")
class TestPairedOnTwo(TestPaired):
    """The same on two ranks, which are one replica."""

    sizes = (2,)


class Unscaled(PairedStrategy):
    """Forgets to scale the gradients of weighted windows."""

    name = "unscaled"

    def scale_gradients(self, factor: float, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Do nothing."""


class Apart(PairedStrategy):
    """Never synchronizes a backward whose forward ran under no_sync."""

    name = "apart"

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Put averaging off."""
        return self._set_held(True)


class OfUnscaled(StrategyConformance):
    """The suite for a strategy that is wrong."""

    strategy = Unscaled


class OfApart(StrategyConformance):
    """The suite for another."""

    strategy = Apart


def test_a_strategy_that_is_wrong_fails(tmp_path: Path) -> None:
    """The suite notices gradients that are not scaled, and gradients that are never averaged."""
    with pytest.raises(pytest.fail.Exception, match="not close"):
        OfUnscaled().test_conforms(2, f"equals_one_process {Case(weighted=True, uneven=True)}", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="not close"):
        OfApart().test_conforms(2, "backward_can_synchronise_late", tmp_path)
