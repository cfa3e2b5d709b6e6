"""The wrapped schedule."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.state import GradientState

pytestmark = pytest.mark.usefixtures("fresh_state")


def _optimizer() -> AcceleratedOptimizer:
    return AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9))


def _made(**kwargs: object) -> tuple[AcceleratedOptimizer, AcceleratedScheduler]:
    optimizer = _optimizer()
    schedule = LambdaLR(optimizer.optimizer, lambda step: 1.0 / (step + 1))
    return optimizer, AcceleratedScheduler(schedule, optimizer, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("adjust", [True, False])
def test_waits_for_the_optimizer_unless_it_moves_alone(adjust: bool) -> None:
    """In a window, whatever adjust_scheduler says, and after a skipped step it stays; alone it moves."""
    GradientState(GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust))
    optimizer, schedule = _made()
    _, alone = _made(step_with_optimizer=False)
    counted = schedule._step_count
    GradientState()._set_sync_gradients(False)
    optimizer.step()
    schedule.step()
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        alone.step()
    GradientState()._set_sync_gradients(True)
    optimizer._is_overflow = True
    schedule.step()
    assert (schedule.get_last_lr(), alone.get_last_lr()) == ([1.0], [0.5])
    assert schedule._step_count == counted


def test_a_metric_counts_once_on_any_number_of_replicas() -> None:
    """A schedule that waits for better metrics sees each of them once, as one process does."""
    metrics, rates = (3.0, 3.0, 2.0, 2.0, 2.0, 2.0), []
    for replicas in (1, 3):
        optimizer = _optimizer()
        schedule = AcceleratedScheduler(ReduceLROnPlateau(optimizer, patience=2), optimizer, replicas=replicas)
        for metric in metrics:
            schedule.step(metric)
            rates.append(schedule.get_last_lr())
    assert rates[:6] == rates[6:]
    assert rates[0] != rates[5]


def test_a_schedule_of_ones_own_may_name_its_end() -> None:
    """A schedule that is none of torch's, has `total_steps` and counts in its own way moves as any other."""

    class Own:
        total_steps = 2
        moves = 0

        def step(self) -> None:
            self.moves += 1

    optimizer, _ = _made()
    own = Own()
    schedule = AcceleratedScheduler(own, optimizer, replicas=3)
    schedule.step()
    assert own.moves == 3


@pytest.mark.parametrize(
    ("kwargs", "moves"), [({"replicas": 1}, 1), ({"replicas": 3, "split_batches": True}, 1), ({"replicas": 3}, 3)]
)
def test_never_moves_past_its_end(kwargs: dict[str, object], moves: int) -> None:
    """Moves behind the end of OneCycleLR, which raises there, are passed over; those before are its own."""
    optimizer, plain = _optimizer(), OneCycleLR(_optimizer().optimizer, max_lr=1.0, total_steps=7)
    inner = OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=7)
    schedule = AcceleratedScheduler(inner, optimizer, **kwargs)  # type: ignore[arg-type]
    plain.optimizer.step()
    for step in range(10):
        optimizer.step()
        schedule.step()
        for _ in range(min(moves, 7 - step * moves)):
            plain.step()
        assert schedule.get_last_lr() == plain.get_last_lr()
