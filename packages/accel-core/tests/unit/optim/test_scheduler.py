"""The wrapped schedule."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.state import GradientState

pytestmark = pytest.mark.usefixtures("fresh_state")


def _made(**kwargs: object) -> tuple[AcceleratedOptimizer, AcceleratedScheduler]:
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    schedule = LambdaLR(optimizer.optimizer, lambda step: 1.0 / (step + 1))
    return optimizer, AcceleratedScheduler(schedule, optimizer, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kwargs", "moves"), [({"replicas": 3}, 3), ({"replicas": 3, "split_batches": True}, 1)])
def test_moves_for_each_optimizer_step(kwargs: dict[str, object], moves: int) -> None:
    """It moves once for each replica, or once where batches are split."""
    optimizer, schedule = _made(**kwargs)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [1.0 / (moves + 1)]


@pytest.mark.parametrize("adjust", [True, False])
def test_waits_inside_a_window(adjust: bool) -> None:
    """No step of the optimizer, no step of the schedule and none counted, whatever adjust_scheduler says."""
    GradientState(GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust))
    optimizer, schedule = _made()
    counted = schedule._step_count
    GradientState()._set_sync_gradients(False)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [1.0]
    assert schedule._step_count == counted


def test_a_metric_counts_once_on_any_number_of_replicas() -> None:
    """A schedule that waits for better metrics sees each of them once, as one process does."""
    metrics, rates = (3.0, 3.0, 2.0, 2.0, 2.0, 2.0), []
    for replicas in (1, 3):
        optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
        schedule = AcceleratedScheduler(ReduceLROnPlateau(optimizer, patience=2), optimizer, replicas=replicas)
        for metric in metrics:
            schedule.step(metric)
            rates.append(schedule.get_last_lr())
    assert rates[:6] == rates[6:]
    assert rates[0] != rates[5]


def test_waits_for_a_skipped_step() -> None:
    """After a step that the gradient scaler skipped it stays where it is."""
    optimizer, schedule = _made()
    optimizer._is_overflow = True
    schedule.step()
    assert schedule.get_last_lr() == [1.0]


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


def test_moves_alone_where_it_is_told_to() -> None:
    """With step_with_optimizer=False every call moves it."""
    _, schedule = _made(step_with_optimizer=False)
    GradientState()._set_sync_gradients(False)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        schedule.step()
    assert schedule.get_last_lr() == [0.5]


def test_never_moves_past_its_end() -> None:
    """A schedule of known length moved by three replicas ends early, and does not fall over its end."""
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9))
    inner = OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=7)
    schedule = AcceleratedScheduler(inner, optimizer, replicas=3)
    rates = []
    for _ in range(5):
        optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    assert rates[1] != rates[2] == rates[3] == rates[4]


@pytest.mark.parametrize("kwargs", [{"replicas": 1}, {"replicas": 3, "split_batches": True}])
def test_stays_at_its_end_where_it_moves_once_a_step(kwargs: dict[str, object]) -> None:
    """Steps behind the end of OneCycleLR, which raises there, are passed over; those before are its own."""
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9))
    schedule = AcceleratedScheduler(
        OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=4),
        optimizer,
        **kwargs,  # type: ignore[arg-type]
    )
    plain = OneCycleLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9), 1.0, total_steps=4)
    plain.optimizer.step()
    for step in range(7):
        optimizer.step()
        schedule.step()
        if step < 4:
            plain.step()
        assert schedule.get_last_lr() == plain.get_last_lr()


def test_state_is_the_wrapped_ones() -> None:
    """Saving and loading go to the schedule inside."""
    _, schedule = _made()
    state = schedule.state_dict()
    state["last_epoch"] = 41
    schedule.load_state_dict(state)
    assert schedule.scheduler.last_epoch == 41
