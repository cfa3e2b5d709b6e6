"""LoRA of peft in mixtures whose experts ranks share out: inside the experts of a list, and beside stacked ones."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "accel-parallel" / "tests"))
from several_ranks import WIDTH, Experts, Listed, advance

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError
from accel_core.mesh.tensor import whole
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world

pytest.importorskip("peft")

ROWS, STEPS = 5, 3


class Net(nn.Module):
    """A router and its experts, between two layers."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)
        self.experts = experts

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return a number for each row."""
        values = self.first(values)
        weights, numbers = self.router(values).softmax(-1).topk(2)
        found: torch.Tensor = self.last(values + self.experts(values, numbers, weights))
        return found


def adapted(kind: type[nn.Module], **targets: Any) -> Any:
    """Return a net with LoRA, the same on every rank."""
    import peft

    torch.manual_seed(5)
    return peft.get_peft_model(Net(kind()), peft.LoraConfig(r=2, init_lora_weights=False, **targets))


def train(net: Any, run: Accelerator | None) -> dict[str, torch.Tensor]:
    """Train on this rank's rows, or on those of both, and return the weights whole."""
    rows = torch.randn(STEPS, 2, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    optimizer: Any = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=0.05)
    if run is not None:
        net, optimizer = run.prepare(net, optimizer)
    for step in rows:
        given = step.reshape(-1, WIDTH) if run is None else step[ensure().rank]
        advance(net(given).square().mean(), optimizer, run=run)
    return {name.removeprefix("module."): whole(value).detach() for name, value in net.state_dict().items()}


def accelerator(sharded: bool) -> Accelerator:
    """Return an Accelerator whose two ranks share out experts."""
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")}
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(ep_size=2), **plugin if sharded else {})


@world(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_of_experts_train_as_one_process(sharded: bool) -> None:
    """Weights of adapters are those of one process, and what they adapt stays as it was."""
    for kind, target in ((Listed, r".*experts\.\d+\.[02]"), (Experts, r".*(first|router)")):
        reset_all()
        net = adapted(kind, target_modules=target)
        before = copy.deepcopy(net.state_dict())
        expected = train(copy.deepcopy(net), None)
        changed = [name for name, value in expected.items() if not torch.equal(value, before[name])]
        assert changed
        assert all("lora_" in name for name in changed)
        for name, value in train(net, accelerator(sharded)).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


@world(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_before_stacked_experts_are_refused(sharded: bool) -> None:
    """The error names the adapter, the experts behind it, and both ways out; the model stays as it was."""
    net = adapted(Experts, target_modules=[], target_parameters=["experts.up"])
    before = dict(net.named_parameters())
    with pytest.raises(PreparationError, match=r"got .*\.experts, an adapter on the experts .*base_layer\. .* list of"):
        accelerator(sharded).prepare(net)
    assert all(parameter is before[name] for name, parameter in net.named_parameters())
