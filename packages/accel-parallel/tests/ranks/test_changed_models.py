"""Passes under `torch.inference_mode` before training."""

from __future__ import annotations

import pytest
import torch
from several_ranks import LAYERS, advance, assert_trained, fsdp
from torch import nn

from accel_core.accelerator import Accelerator
from accel_testing import requires, world


class Net(nn.Module):
    """Layers of which some do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5)), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers for five."""
        y: torch.Tensor = self.head(self.body(x))
        return y


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", pytest.param("fsdp2", marks=requires("torch:2.8"))])
@world(2)
def test_inference_before_training_leaves_it_as_in_one_process(kind: str) -> None:
    """A first pass under inference_mode, and later ones, change nothing of what is trained."""
    plugin = fsdp(int(kind[-1]), **LAYERS | {"min_num_params": 15}) if kind != "ddp" else None
    accelerator, net, alone = Accelerator(cpu=True, fsdp_plugin=plugin), Net(), Net()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    expected = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(net(torch.ones(2, 5)), alone(torch.ones(2, 5)), rtol=0, atol=1e-6)
        with torch.no_grad():
            net(torch.ones(2, 5))
        advance(net(torch.full((2, 5), 1.0 + accelerator.process_index)).square().mean(), optimizer, run=accelerator)
        for rank in range(2):
            (alone(torch.full((2, 5), 1.0 + rank)).square().mean() / 2).backward()
        expected.step()
        expected.zero_grad()
    assert_trained(accelerator, net, alone.state_dict())
