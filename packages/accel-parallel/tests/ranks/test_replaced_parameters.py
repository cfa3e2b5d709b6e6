"""What parameters have besides values, where preparing a model makes new ones of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from several_ranks import fsdp, refused, split
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError
from accel_core.state import reset_all
from accel_testing import requires, world

pytestmark = requires("torch:2.8")  # the first whose FSDP2 computes in shards on a CPU

_ENGINES = {"fsdp1": 2, "fsdp2": 2, "tp": 2, "fsdp2 and tp": 4}
"""On how many ranks each is tried."""


class Net(nn.Module):
    """A list of blocks, a head, and a scalar, which is never sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers for four."""
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x) * self.scale
        return y


def _start(engine: str, **given: Any) -> Accelerator:
    """Return a run that makes new parameters of all weights in the blocks."""
    if "tp" in engine:
        shards = 2 if "fsdp2" in engine else 1
        given["parallelism_config"] = split({"blocks.*.0": "colwise_rep"}, dp_shard_size=shards)
    if "fsdp" in engine:
        given["fsdp_plugin"] = fsdp(int(engine[4]), use_orig_params=True if engine == "fsdp1" else None)
    return Accelerator(**given)


@pytest.mark.parametrize(("engine", "ranks"), _ENGINES.items())
@world("ranks")
def test_hooks_of_parameters_that_would_be_replaced_are_refused(engine: str, ranks: int) -> None:
    """A hook on a parameter that training no longer uses is named; one on a parameter that stays is kept."""
    for add in ("register_hook", "register_post_accumulate_grad_hook"):
        net, accelerator = Net(), _start(engine)
        handle = getattr(net.blocks[1][0].weight, add)(lambda _: None)
        with refused(PreparationError, r"got hooks of blocks\.1\.0\.weight\. ", accelerator, net):
            accelerator.prepare(net)
        handle.remove()
        getattr(net.scale, add)(lambda _: None)  # stays the parameter that it is
        accelerator.prepare(net)
        reset_all()


@pytest.mark.parametrize(("engine", "ranks"), _ENGINES.items())
@world("ranks")
def test_marks_of_parameters_are_kept(engine: str, ranks: int) -> None:
    """Attributes by which an optimizer sorts parameters are those of the new parameters too."""
    net = Net()
    net.blocks[0][0].weight.is_muon = True
    net.blocks[1][1].bias.rates = rates = [0.1]
    net.head.weight.is_muon = False
    net.scale.is_muon = False
    prepared = _start(engine).prepare(net)
    marks = {
        name.replace("_fsdp_wrapped_module.", ""): {k: v for k, v in vars(p).items() if k in ("is_muon", "rates")}
        for name, p in prepared.named_parameters()
    }
    assert {name: own for name, own in marks.items() if own} == {
        "blocks.0.0.weight": {"is_muon": True},
        "blocks.1.1.bias": {"rates": rates},
        "head.weight": {"is_muon": False},
        "scale": {"is_muon": False},
    }
    assert any(vars(p).get("rates") is rates for p in prepared.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@world(2)
def test_number_formats_that_a_block_mixes_are_refused(engine: str, dtype: torch.dtype) -> None:
    """Parameters that train in another format than the rest of their block are named."""
    net, word = Net(), str(dtype).removeprefix("torch.")
    net.blocks[1][1].weight = nn.Parameter(torch.ones(4, dtype=dtype))
    accelerator = _start(engine)
    with refused(PreparationError, rf"got {word} for 1\.weight; float32 for .* in blocks\.1\. ", accelerator, net):
        accelerator.prepare(net)
    net.blocks[1][1].weight.requires_grad_(False)
    if engine == "fsdp2":
        accelerator.prepare(net)


@world(2)
def test_half_precision_in_a_block_trains_where_masters_are_kept() -> None:
    """What mixed precision keeps in 32 bits mixes no formats."""
    net = Net()
    net.blocks[1][0].to(torch.bfloat16)
    prepared = _start("fsdp2", mixed_precision="bf16").prepare(net)
    prepared(torch.ones(1, 4)).sum().backward()
