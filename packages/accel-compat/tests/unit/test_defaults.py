"""What the process means where code leaves it open, once the drop-in is imported."""

import os
import subprocess
import sys

import pytest

import accelerate
from accelerate.tracking import filter_trackers
from accelerate.utils import GradientAccumulationPlugin

WINDOW = """
import sys
import torch
from {package} import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(3, 1)))
for batch in loader:
    with accelerator.accumulate(model):
        model.weight.grad = None
        accelerator.backward(model(batch).sum())
sys.exit(round(10 * model.weight.grad.item()))
"""


@pytest.mark.parametrize(("package", "share"), [("accel", 1), ("accelerate", 0.5)])
def test_the_last_batch_counts_as_the_import_says(package: str, share: float) -> None:
    """In a process of its own, a batch alone in the last window of two counts whole for accel, half for the drop-in."""
    words = [sys.executable, "-W", "ignore", "-c", WINDOW.format(package=package)]
    done = subprocess.run(words, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == round(10 * share)


def test_the_default_can_be_chosen_for_one_run(fresh_state: None) -> None:
    """A plugin that says what it means is obeyed, whatever the process means."""
    assert GradientAccumulationPlugin.default_short_window == "full"
    plugin = GradientAccumulationPlugin(num_steps=2, short_window="actual")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert accelerator.gradient_state.short_window == "actual"


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make wandb, which may be here, a library that is not."""
    monkeypatch.setitem(sys.modules, "wandb", None)


def test_a_tracker_without_its_library_is_passed_over(
    no_wandb: None, fresh_state: None, caplog: pytest.LogCaptureFixture
) -> None:
    """`log_with="wandb"` without wandb warns once, and the run goes on without it: nothing is tracked."""
    for _ in range(2):
        accelerator = accelerate.Accelerator(cpu=True, log_with="wandb")
        accelerator.init_trackers("project")
        accelerator.log({"loss": 1.0})
        accelerator.end_training()
        assert accelerator.trackers == []
    assert filter_trackers(["wandb"]) == []
    assert [record.getMessage().count("'wandb' needs a library") for record in caplog.records] == [1]
