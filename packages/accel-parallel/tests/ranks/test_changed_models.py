"""Passes under `torch.inference_mode` before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_parallel.plugin import FullyShardedDataParallelPlugin
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


def _arguments(kind: str) -> dict[str, Any]:
    """Return what an Accelerator needs to train this way."""
    if not kind.startswith("fsdp"):
        return {}
    settings: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 15}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1]), **settings)}


_KINDS = ["ddp", "fsdp1", pytest.param("fsdp2", marks=requires("torch:2.8"))]


def _step(accelerator: Accelerator, net: nn.Module, optimizer: Any) -> None:
    accelerator.backward(net(torch.full((2, 5), 1.0 + accelerator.process_index)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", _KINDS)
@world(2)
def test_inference_before_training_leaves_it_as_in_one_process(kind: str) -> None:
    """A first pass under inference_mode, and later ones, change nothing of what is trained."""
    accelerator, net, alone = Accelerator(cpu=True, **_arguments(kind)), Net(), Net()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    expected = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(net(torch.ones(2, 5)), alone(torch.ones(2, 5)), rtol=0, atol=1e-6)
        with torch.no_grad():
            net(torch.ones(2, 5))
        _step(accelerator, net, optimizer)
        for rank in range(2):
            (alone(torch.full((2, 5), 1.0 + rank)).square().mean() / 2).backward()
        expected.step()
        expected.zero_grad()
    found = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(found), dict(alone.state_dict()), rtol=0, atol=1e-6)
