"""Parameters that join a model which was prepared before, as adapters do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from several_ranks import LAYERS, advance, fsdp
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError
from accel_core.plugins.parallelism import ParallelismConfig
from accel_testing import requires, world


class Adapted(nn.Module):
    """A layer that stays as it is, with a small product beside it that learns."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what was learned."""
        found: torch.Tensor = self.plain(x) + x @ self.down.T @ self.up.T
        return found


def arguments(kind: str) -> dict[str, Any]:
    """Return a plugin that shards all but the last layer, or axes by which two ranks share sequences."""
    if kind == "context":
        return {"parallelism_config": ParallelismConfig(cp_size=2)}
    return {"fsdp_plugin": fsdp(**LAYERS, ignored_modules="1")}


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """Train on other data on each rank, outside of a block that would split it."""
    advance(model(torch.full((2, 4), 1.0 + accelerator.process_index)).square().mean(), optimizer, run=accelerator)


@requires("torch:2.8")  # the first that computes in shards on a CPU
@pytest.mark.parametrize("kind", ["sharded", "context"])
@world(2)
def test_adapters_join_a_model_that_was_trained(kind: str) -> None:
    """They start from the values of the first rank, and train alike on all; the layers under them can be moved."""
    accelerator, model = Accelerator(cpu=True, **arguments(kind)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    step(accelerator, model, optimizer)
    model.to(accelerator.device)
    step(accelerator, model, optimizer)

    accelerator.free_memory()
    model.requires_grad_(False)
    torch.manual_seed(accelerator.process_index)
    model[0] = Adapted(model[0]).to(accelerator.device)
    first = accelerator.gather(model[0].down[None])[0].clone()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(learned, lr=0.01))
    torch.testing.assert_close(model[0].down, first, rtol=0, atol=0)
    step(accelerator, model, optimizer)
    for parameter in learned:
        copies = accelerator.gather(parameter.detach()[None])
        torch.testing.assert_close(copies[0], copies[1], rtol=0, atol=0)
    assert not torch.equal(model[0].down, first)


@world(2)
def test_parameters_that_ddp_does_not_average_are_refused() -> None:
    """A model that gained or unfroze parameters after it was prepared is refused until its wrapper is gone."""
    accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].requires_grad_(False)
    prepared = accelerator.prepare(model)
    assert accelerator.prepare(model) is prepared
    model[1].weight.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in (model, prepared):
        with pytest.raises(PreparationError, match=r"got the same model with 1 others: 1\.weight"):
            accelerator.prepare(given, optimizer)
        with pytest.raises(PreparationError, match=r"1\.weight"):
            accelerator.prepare_model(given)
    assert accelerator._optimizers == []
    model[0] = Adapted(model[0])
    with pytest.raises(PreparationError, match=r"got the same model with 3 others: 0\.down, 0\.up, 1\.weight"):
        accelerator.prepare(model)
    del prepared, given
    accelerator.free_memory()
    again = accelerator.prepare(model)
    accelerator.backward(again(torch.full((2, 4), 1.0 + accelerator.process_index)).sum())
    copies = accelerator.gather(model[0].up.grad[None])
    torch.testing.assert_close(copies[0], copies[1], rtol=0, atol=0)
