"""States saved on a GPU: the run goes on bit for bit, and a state loads where it was not saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.state import reset_all

DEVICE = torch.device("cuda", 0)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": partial(torch.optim.AdamW, lr=1e-2),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "capturable": partial(torch.optim.AdamW, lr=1e-2, capturable=DEVICE.type != "cpu"),
}
EPOCHS, BATCHES, BATCH = 2, 6, 8

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),  # torch's advice
]


class Run:
    """A run from scratch, whose dropout draws on the device."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], seed: int = 0, **settings: Any) -> None:
        reset_all()
        self.accelerator = Accelerator(**settings)
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 4))
        data = TensorDataset(torch.randn(BATCHES * BATCH, 16, generator=torch.Generator().manual_seed(1)))
        loader, optimizer = DataLoader(data, batch_size=BATCH, shuffle=True), make(plain.parameters())
        prepared: Any = self.accelerator.prepare(plain, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared
        self.average = self.accelerator.ema(self.model, decay=0.8)

    def step(self, batch: Tensor) -> None:
        """Make one step."""
        self.accelerator.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, save_at: int | None = None, folder: Path | None = None, *, blocking: bool = True) -> list[Tensor]:
        """Train to the end, and save on the way; return what was trained."""
        number, handle = 0, None
        while self.loader.iteration < EPOCHS:
            for (batch,) in self.loader:
                self.step(batch)
                number += 1
                if number == save_at:
                    handle = self.accelerator.save_state(str(folder), blocking=blocking)
        if handle is not None and not blocking:
            handle.wait()
        return self.tensors()

    def tensors(self) -> list[Tensor]:
        """Return weights, averages and the optimizer's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.average.state.averages.values(), *states]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_is_the_run_in_one_go(optimizer: str, precision: str, blocking: bool, tmp_path: Path) -> None:
    """Saved in the middle of an epoch while it trains on, all that follows is the same, and lies where it lay."""
    make = OPTIMIZERS[optimizer]
    straight = Run(make, mixed_precision=precision).train(4, tmp_path / "state", blocking=blocking)
    resumed = Run(make, seed=9, mixed_precision=precision)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    found = resumed.train()
    assert all(map(torch.equal, found, straight))
    assert [each.device for each in found] == [each.device for each in straight]
    assert all(parameter.device == DEVICE for parameter in resumed.model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_background_save_holds_the_moment(optimizer: str, tmp_path: Path) -> None:
    """Steps that change weights in place right behind two saves into the same buffers do not reach what is saved."""
    run = Run(OPTIMIZERS[optimizer])
    wanted, batch = [], torch.ones(BATCH, 16, device=DEVICE)
    for name in ("first", "second"):
        for _ in range(3):
            run.step(batch)
        wanted.append([each.clone() for each in run.tensors()])
        handle = run.accelerator.save_state(str(tmp_path / name), blocking=False)
        for _ in range(20):
            run.step(batch)
        handle.wait()
    for name, tensors in zip(("first", "second"), wanted, strict=True):
        run.accelerator.load_state(str(tmp_path / name))
        assert all(map(torch.equal, run.tensors(), tensors))


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
@pytest.mark.parametrize("saved_on", ["device", "cpu"])
def test_a_state_loads_on_another_device(saved_on: str, optimizer: str, tmp_path: Path) -> None:
    """What a GPU saved, the CPU loads, and the other way round; both go on from the same values, on their device."""
    make = OPTIMIZERS[optimizer]
    first = Run(make, cpu=saved_on == "cpu")
    for (batch,) in first.loader:
        first.step(batch)
    first.accelerator.save_state(str(tmp_path / "state"))
    second = Run(make, seed=9, cpu=saved_on != "cpu")
    second.accelerator.load_state(str(tmp_path / "state"))
    for one, other in zip(second.tensors(), first.tensors(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    before = [parameter.detach().clone() for parameter in second.model.parameters()]
    second.step(torch.ones(BATCH, 16, device=second.accelerator.device))
    assert not any(map(torch.equal, before, second.model.parameters()))
    kinds = {each.device.type for each in second.model.parameters()}
    assert kinds == {second.accelerator.device.type} == {DEVICE.type if saved_on == "cpu" else "cpu"}


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_a_state_of_a_plain_run_is_moved_as_torch_wants_it(optimizer: str) -> None:
    """An optimizer that made steps on the CPU is prepared for the device: counters of steps lie where torch's do."""
    make = OPTIMIZERS[optimizer]
    model, twin = (nn.Linear(4, 4) for _ in range(2))
    used, fresh = make(model.parameters()), make(twin.parameters())
    model(torch.ones(2, 4)).sum().backward()
    used.step()
    used.zero_grad()
    accelerator = Accelerator()
    for trained, stepped in ((model, used), (twin, fresh)):
        prepared, wrapped = accelerator.prepare(trained, stepped)
        accelerator.backward(prepared(torch.ones(2, 4, device=DEVICE)).sum())
        wrapped.step()
    for one, other in zip(used.state.values(), fresh.state.values(), strict=True):
        assert {name: value.device for name, value in one.items()} == {name: v.device for name, v in other.items()}
