"""Modules that a model says it keeps in 32 bits compute so under FSDP, while the others compute in bf16."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from several_ranks import advance, fsdp, logged
from torch import nn
from torch.nn import functional

from accel_core.accelerator import Accelerator
from accel_core.comm.collectives import gather
from accel_testing import requires, world

pytestmark = requires("torch:2.8")  # the first that computes in shards on a CPU


class Block(nn.Module):
    """Three layers, a parameter of the block's own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.wo = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers for numbers."""
        y: torch.Tensor = self.wo(self.up(self.norm(x)).tanh())
        return x + y * self.scale.to(x.dtype) + self.shift.to(x.dtype)


class Net(nn.Module):
    """Two blocks and a head, with the marks that transformers' models have."""

    _no_split_modules = ("Block",)
    _keep_in_fp32_modules: Any = ("wo",)
    _keep_in_fp32_modules_strict: Any = ("head.*",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers for four."""
        y: torch.Tensor = self.head(self.blocks(x))
        return y


def _start(version: int, autocast: bool = True, **given: Any) -> Accelerator:
    given |= {"use_orig_params": True} if version == 1 else {}
    given |= {} if autocast else {"mixed_precision_policy": "bf16"}
    plugin = fsdp(version, auto_wrap_policy="transformer_based_wrap", **given)
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16" if autocast else "no")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("autocast", "recomputed"), [(True, False), (True, True), (False, False)])
@world(2)
def test_kept_modules_compute_in_32_bits(version: int, autocast: bool, recomputed: bool) -> None:
    """Their weights are not rounded, nor are their outputs; gradients are averaged, and steps keep ranks alike."""
    net = Net()
    before = [module.weight.detach().clone() for module in (net.blocks[0].wo, net.head)]
    seen: list[tuple[torch.Tensor, ...]] = []

    def see(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        assert output.dtype is torch.float32
        assert module.weight.dtype is torch.float32
        with torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(output, functional.linear(args[0].float(), module.weight, module.bias))
        seen.append(module.weight.detach().clone())

    formats = set[torch.dtype]()
    for module in (net.blocks[0].wo, net.head):
        module.register_forward_hook(see)
    net.blocks[0].up.register_forward_hook(lambda module, *_: formats.add(module.weight.dtype))
    accelerator = _start(version, autocast, activation_checkpointing=recomputed)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for _ in range(2):
        inputs = torch.ones(2, 4) * accelerator.process_index
        advance(model(inputs).float().square().mean(), optimizer, run=accelerator)
    assert formats == {torch.bfloat16}
    assert torch.equal(seen[0], before[0])
    assert torch.equal(seen[1], before[1])
    assert not torch.equal(seen[-1], seen[1])
    last = gather(seen[-1][None])
    assert torch.equal(last[0], last[1])


@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_what_is_cast_though_kept_is_named_once(version: int) -> None:
    """FSDP2 casts what only a part of a module is, and FSDP1 buffers; one warning names them."""
    lines, net = logged("accel_parallel.sharding.wrapping"), Net()
    net._keep_in_fp32_modules_strict = {"scale", "shift"}
    accelerator = _start(version)
    accelerator.prepare(net)
    name = "shift" if version == 1 else "scale"
    said = [line.getMessage() for line in lines if line.levelno == logging.WARNING]
    assert len(said) == accelerator.is_main_process
    assert all(f"got blocks.0.{name}, blocks.1.{name}. Name the" in line for line in said)
