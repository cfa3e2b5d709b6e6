"""A run that goes on adds gradients up in the order of the run before it, so that more than two ranks lose no bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_core.accelerator import Accelerator
from accel_core.modules.reduction_order import ReductionOrders
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.state import reset_all
from accel_testing import world


class Net(nn.Module):
    """A model whose layers compute in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(300, 10), nn.Linear(64, 300), nn.Linear(300, 300)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.last(self.middle(self.first(inputs).relu()).relu())
        return scores


class Trained:
    """A run that trains on random numbers, the same in each try."""

    def __init__(self, accumulated: int, ddp: dict[str, Any]) -> None:
        reset_all()
        handlers: list[Any] = [DistributedDataParallelKwargs(**ddp)]
        self.run = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, kwargs_handlers=handlers)
        net = Net()
        self.model: Any
        self.model, self.optimizer = self.run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))

    def train(self, first: int, last: int) -> None:
        """Train on the batches from one to another, behind a pass without gradients."""
        with torch.no_grad():
            self.model(torch.zeros(1, 64))
        for batch in range(first, last):
            numbers = torch.Generator().manual_seed(100 * batch + self.run.process_index)
            with self.run.accumulate(self.model):
                self.run.backward(self.model(torch.randn(16, 64, generator=numbers)).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        """Return copies of the weights."""
        return [each.detach().clone() for each in self.model.parameters()]


@pytest.mark.parametrize(
    ("saved", "accumulated", "ddp"),
    [(1, 1, {}), (4, 1, {"gradient_as_bucket_view": True}), (4, 2, {}), (4, 1, {"find_unused_parameters": True})],
)
@world(3)
def test_a_run_that_goes_on_loses_no_bit(saved: int, accumulated: int, ddp: dict[str, Any], tmp_path: Path) -> None:
    """Saved behind its first step or later, and gone on twice, it has the weights of one that was not stopped."""
    straight = Trained(accumulated, ddp)
    straight.train(0, saved)
    straight.run.save_state(str(tmp_path / "one"))
    straight.train(saved, 12)
    wanted = straight.weights()
    own = Trained(accumulated, ddp)
    for _ in range(2):
        own.run.load_state(str(tmp_path / "one"))
    own.train(saved, saved + 2)
    own.run.save_state(str(tmp_path / "two"))
    own = Trained(accumulated, ddp)
    own.run.load_state(str(tmp_path / "two"))
    own.train(saved + 2, 12)
    assert all(torch.equal(one, other) for one, other in zip(wanted, own.weights(), strict=True))


@world(3)
def test_whoever_listens_to_gradients_hears_of_no_step(tmp_path: Path) -> None:
    """A hook behind gradients on one rank alone, which may step, is called as often as there are passes; none hangs."""
    straight = Trained(1, {})
    straight.train(0, 2)
    orders = ReductionOrders([straight.model]).state_dict()["orders"]
    assert sorted(orders[0]) == list(range(6))
    straight.run.save_state(str(tmp_path))
    own, heard = Trained(1, {}), list[Tensor]()
    if own.run.is_main_process:
        own.model.module.last.weight.register_post_accumulate_grad_hook(lambda weight: heard.append(weight.grad))
    own.run.load_state(str(tmp_path))
    own.train(2, 3)
    assert len(heard) == own.run.is_main_process
    weights = own.run.gather(torch.cat([each.flatten() for each in own.weights()])[None])
    assert all(torch.equal(each, weights[0]) for each in weights)
