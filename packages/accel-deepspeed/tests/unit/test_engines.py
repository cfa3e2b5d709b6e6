"""What stands for an engine's optimizer and schedule outside; the library is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_deepspeed.engines import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_without_an_engine_steps_are_left_to_who_drives_it() -> None:
    """Steps and zeroes of optimizer and schedule change nothing, and a skipped step is the optimizer's to tell."""
    net = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [parameter.clone() for parameter in net.parameters()]
    net(torch.ones(1, 2)).sum().backward()
    wrapper = DeepSpeedOptimizerWrapper(optimizer)
    wrapper.step()
    wrapper.zero_grad()
    DeepSpeedSchedulerWrapper(schedule, [wrapper]).step()
    assert all(
        torch.equal(old, new) and new.grad is not None for old, new in zip(before, net.parameters(), strict=True)
    )
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)
    assert not wrapper.step_was_skipped
    optimizer.overflow = True
    assert wrapper.step_was_skipped
