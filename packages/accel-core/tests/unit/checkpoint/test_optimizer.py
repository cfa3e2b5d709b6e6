"""Optimizers of torch go on bit for bit, and foreign states are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.errors import CheckpointMismatchError

pytestmark = pytest.mark.usefixtures("fresh_state")

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


def step(run: BareRun, count: int) -> None:
    """Train on fixed data."""
    data = torch.linspace(-1, 1, 12).reshape(4, 3)

    def closure() -> torch.Tensor:
        run.optimizers[0].zero_grad()
        loss = run.models[0](data).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(count):
        run.optimizers[0].step(closure)


def build(name: str, seed: int) -> BareRun:
    """Return a run with one layer and one optimizer."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return BareRun([model], [OPTIMIZERS[name](model.parameters())])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")  # torch 2.8, in LBFGS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_next_step_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Three steps, save, two steps equal load and two steps, for a fresh optimizer and for one with state."""
    run = build(name, 1)
    step(run, 3)
    save_state(run, tmp_path / "ckpt")
    step(run, 2)
    for steps_before in (0, 2):
        other = build(name, 2)
        step(other, steps_before)
        load_state(other, tmp_path / "ckpt")
        step(other, 2)
        assert torch.equal(run.models[0].weight, other.models[0].weight)
        assert torch.equal(run.models[0].bias, other.models[0].bias)


@pytest.mark.parametrize(
    ("name", "width", "says"),
    [
        ("momentum", 3, "another optimizer"),
        ("AdamW", 4, r"exp_avg of parameter 0 has shape \(2, 3\) instead of \(2, 4\)"),
    ],
)
def test_another_optimizer_is_refused(name: str, width: int, says: str, tmp_path: Path) -> None:
    """The state of one optimizer class, or of parameters of another shape, is not forced into another optimizer."""
    run = build("AdamW", 1)
    step(run, 1)
    save_state(run, tmp_path / "ckpt")
    with pytest.raises(CheckpointMismatchError, match=says):
        load_state(BareRun([], [OPTIMIZERS[name](nn.Linear(width, 2).parameters())]), tmp_path / "ckpt")


def test_a_file_without_a_state_is_refused(tmp_path: Path) -> None:
    """What another program wrote under the name is found before anything changes, although its checksum is right."""
    run = build("AdamW", 1)
    run.optimizers[0].state_dict = lambda: {"state": {}}
    save_state(run, tmp_path / "ckpt")
    other = build("AdamW", 2)
    before = other.models[0].weight.detach().clone()
    with pytest.raises(CheckpointMismatchError, match="holds no state of an optimizer"):
        load_state(other, tmp_path / "ckpt")
    assert torch.equal(other.models[0].weight, before)
