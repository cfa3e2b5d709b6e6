"""What a strategy may own: order, kinds, number format, steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.errors import StateError
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.options.enums import DistributedType
from accel_core.precision.precision import Precision
from accel_core.strategies import registry
from accel_core.strategies.bundle import Bundle, Kind
from accel_core.strategies.parts import Kit, PrecisionRequest
from accel_core.strategies.registry import register_strategy
from accel_core.strategies.single import SingleStrategy
from accel_core.strategies.strategy import Strategy, strategy_of

pytestmark = pytest.mark.usefixtures("fresh_state")


class DummyOptim:
    """Stands for an optimizer that the strategy makes."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.001) -> None:
        self.params, self.lr = params, lr


class DummyScheduler:
    """Stands for a schedule that the strategy makes."""


class CountingStepper:
    """Counts instead of stepping."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.step_was_skipped = False

    def step(self, closure: Callable[[], Any] | None) -> str:
        """Count a step."""
        self.calls.append("step")
        return "stepped"

    def zero_grad(self, set_to_none: bool | None) -> None:
        """Count a clearing."""
        self.calls.append("zero")


class Owner(SingleStrategy):
    """Owns what an engine may own."""

    name = "owner"

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Compute in a format of its own, without autocast or scaler."""
        return Precision(asked.name)

    def kind_of(self, given: Any) -> Kind | None:
        """Recognize stand-ins."""
        if isinstance(given, DummyOptim):
            return "optimizers"
        return "schedulers" if isinstance(given, DummyScheduler) else None

    def check(self, bundle: Bundle) -> None:
        """Refuse nothing."""

    def prepare(self, bundle: Bundle, kit: Kit) -> None:
        """Begin with loaders, and make the optimizer from its stand-in."""
        self.order = [type(slot.given).__name__ for slot in (*bundle.loaders, *bundle.models, *bundle.optimizers)]
        for slot in bundle.loaders:
            slot.result = kit.prepare_loader(slot.given, slot.place)
        for slot in bundle.models:
            slot.result = self.prepare_model(slot.given)
            kit.keep_model(slot.result)
        for slot in bundle.optimizers:
            made = torch.optim.SGD(slot.given.params, lr=slot.given.lr)
            slot.result = kit.prepare_optimizer(made, False)
        for slot in bundle.schedulers:
            schedule = torch.optim.lr_scheduler.ConstantLR(kit.optimizers[0].optimizer)
            slot.result = kit.prepare_scheduler(schedule)

    def stepper(self, optimizer: torch.optim.Optimizer) -> CountingStepper:
        """Count instead of stepping."""
        self.counting = CountingStepper()
        return self.counting


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """Give an Accelerator of that strategy."""
    return _chosen(Owner, monkeypatch, partial(Accelerator, mixed_precision="fp16"))


def test_a_strategy_owns_order_and_kinds(owned: Accelerator) -> None:
    """Loaders come first where it wants that, and its stand-ins become optimizer and schedule."""
    model = nn.Linear(1, 1)
    stand_in = DummyOptim(list(model.parameters()), lr=0.5)
    net, optimizer, loader, schedule, other = owned.prepare(
        model, stand_in, DataLoader([1.0, 2.0]), DummyScheduler(), "text"
    )
    strategy: Any = owned._runtime.strategy
    assert strategy.order == ["DataLoader", "Linear", "DummyOptim"]
    assert (net, other) == (model, "text")
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert schedule.optimizers == [optimizer]
    assert owned._dataloaders == [loader]


def test_a_strategy_owns_the_number_format(owned: Accelerator) -> None:
    """It gets the name that was asked for, and its answer counts: no autocast around forward, and no scaler."""
    model = owned.prepare(nn.Linear(1, 1))
    assert owned.mixed_precision == "fp16"
    assert owned.scaler is None
    assert "forward" not in model.__dict__


def test_a_stepper_steps_only_where_a_window_ends(owned: Accelerator) -> None:
    """Steps and clearings go to it, once a window, and it says whether a step was skipped."""
    owned.gradient_accumulation_steps = 2
    optimizer = owned.prepare(DummyOptim(list(nn.Linear(1, 1).parameters())))
    stepper = owned._runtime.strategy.counting  # type: ignore[attr-defined]
    with owned.accumulate():
        optimizer.step()
        optimizer.zero_grad()
    assert stepper.calls == []
    with owned.accumulate():
        assert optimizer.step() == "stepped"
        optimizer.zero_grad()
    assert stepper.calls == ["step", "zero"]
    stepper.step_was_skipped = True
    assert owned.optimizer_step_was_skipped


def test_a_model_knows_its_strategy_while_that_lives() -> None:
    """The strategy is found through a compiled form, too; a model that was not prepared has none."""
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    assert strategy_of(model) is None
    prepared = accelerator.prepare(model)
    assert (
        strategy_of(prepared) is strategy_of(torch.compile(prepared, backend="eager")) is accelerator._runtime.strategy
    )


class Planner(SingleStrategy):
    """Counts its plans, and takes each from where `check` left it."""

    name = "planner"
    planned: ClassVar[list[nn.Module]] = []
    found: ClassVar[list[object]] = []

    def plan(self, model: nn.Module) -> int:
        """Return the number of the plan."""
        self.planned.append(model)
        return len(self.planned)

    def split(self, model: nn.Module) -> nn.Module:
        """Note which plan is there."""
        self.found.append(self.plans[model])
        return model


class Changing(Accelerator):
    """Changes some models before it prepares them."""

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """Exchange the weight of a bilinear layer."""
        if isinstance(model, nn.Bilinear):
            model.weight = nn.Parameter(model.weight.detach().clone())
        return super().prepare_model(model, *args, **kwargs)


def _chosen(
    strategy: type[Strategy], monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Accelerator] = Accelerator
) -> Accelerator:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("ACCELERATE_STRATEGY", strategy.name)
    register_strategy(strategy)
    return kind()


def test_a_model_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with others, alone or for evaluation: once for each call, and again only where it changed since."""
    monkeypatch.setattr(Planner, "planned", planned := [])
    monkeypatch.setattr(Planner, "found", found := [])
    accelerator = _chosen(Planner, monkeypatch, Changing)
    first, second, changed = nn.Linear(1, 1), torch.compile(nn.Linear(1, 1), backend="eager"), nn.Bilinear(1, 1, 1)
    accelerator.prepare(first, second, changed)
    assert planned == [first, second, changed, changed]
    assert found == [1, 2, 4]
    accelerator.prepare_model(first)
    accelerator.prepare_model(first, evaluation_mode=True)
    assert planned[4:] == [first, first]
    assert found[3:] == [5, 6]
    assert not accelerator._runtime.strategy.plans


def test_a_strategy_has_to_say_how_processes_train_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not is refused where it would distribute a model."""

    class Silent(Strategy):
        name = "silent"

        def label(self) -> DistributedType:
            return DistributedType.NO

    with pytest.raises(StateError, match="'silent', which has no `distribute`"):
        _chosen(Silent, monkeypatch).prepare(nn.Linear(1, 1))
