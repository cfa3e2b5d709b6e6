"""Which runs DeepSpeed trains, and what stands for its optimizers outside; the library is not needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.host.environ import patch_environment, text
from accel_core.options.engines import load
from accel_core.plugins import deepspeed as old_path
from accel_core.strategies import registry
from accel_core.strategies.registry import Request, choose
from accel_core.strategies.single import SingleStrategy
from accel_deepspeed import library
from accel_deepspeed.engines import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accel_deepspeed.plugin import DeepSpeedPlugin
from accel_deepspeed.row import ENGINE

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_deepspeed_is_chosen_without_importing_it() -> None:
    """A plugin, or the variable of a launcher, asks for DeepSpeed; the library is imported with the first engine."""
    plugin = DeepSpeedPlugin()
    for processes in (1, 2):
        choice = choose(Request(processes, (plugin,)))
        assert (choice.strategy.name, choice.plugins, choice.argument) == ("deepspeed", (plugin,), "deepspeed_plugin")
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3"):
        choice = choose(Request(2))
    assert (choice.strategy.name, choice.plugins[0].zero_stage) == ("deepspeed", 3)
    assert "deepspeed" not in sys.modules
    # Code written before the package was one imports from accel-core what it imports from here.
    assert (old_path.DeepSpeedPlugin, old_path.DummyOptim.__name__) == (DeepSpeedPlugin, "DummyOptim")


def test_the_first_of_several_plugins_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins keep the names that the user gave; the strategy's own is the one selected."""
    monkeypatch.setattr(registry, "load", lambda home: SingleStrategy if home == ENGINE.strategy else load(home))
    monkeypatch.setenv(ENGINE.flag, "")
    student, teacher = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)
    accelerator = Accelerator(deepspeed_plugins={"student": student, "teacher": teacher})
    parts = accelerator._runtime.strategy.parts
    assert parts.plugins == (student, teacher)
    assert accelerator.deepspeed_plugin is parts.plugin is student
    assert (student.selected, teacher.selected) == (True, False)
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin is parts.plugin is teacher
    second = Accelerator()
    assert second.state.deepspeed_plugins == {"student": student, "teacher": teacher}
    assert second.deepspeed_plugin is teacher


@pytest.mark.parametrize(("device", "number"), [("cuda:0", "0"), ("cuda:1", "1"), ("cpu", "3")])
def test_the_device_of_an_engine_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, device: str, number: str) -> None:
    """DeepSpeed takes LOCAL_RANK for the number of the device, which it is not where each process sees a GPU alone."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    with library.as_local_rank(torch.device(device)):
        assert text("LOCAL_RANK") == number
    assert text("LOCAL_RANK") == "3"


@pytest.mark.parametrize("stale", [True, False])
def test_a_lock_that_stays_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, stale: bool
) -> None:
    """DeepSpeed waits forever for the lock of a process that was killed while it compiled an operator."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(library.time, "sleep", lambda _: None if stale else lock.unlink())
    library.wait_for_locks.__wrapped__(0.05)
    assert sum(f"got {lock} for 0.05 s" in text for text in caplog.messages) == stale


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
