"""Muon on shards: each matrix is orthogonalized once, and ranks send one gather and one scatter of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_ranks import COPIES, assert_trained, fsdp, split
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.plugins.parallelism import ParallelismConfig
from accel_testing import requires, world

pytestmark = requires("torch:2.10")
WAYS = {
    "fsdp2": None,
    "copies of shards": ParallelismConfig(**COPIES),
    "fsdp2 and tp": split({"0": "colwise", "1": "rowwise"}, dp_shard_size=2),
}


def net() -> nn.Sequential:
    """Return eight matrices, of rows that no number of ranks divides, with the same values each time."""
    torch.manual_seed(0)
    sizes = (6, 8, 5, 7, 9, 6, 3, 10, 4)
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)))


def train(model: nn.Module, optimizer: Any, backward: Any) -> list[float]:
    """Train three steps with a closure, on the same rows on all ranks; return what the steps return."""
    torch.manual_seed(1)
    losses = []
    for batch in torch.randn(3, 4, 6).to(next(model.parameters()).dtype):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch) - 1).square().mean()
            backward(loss)
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
        assert all(parameter.grad is not None for parameter in model.parameters())
    return losses


def check(way: str) -> tuple[int, float]:
    """Check that a way trains as one process; return what this rank orthogonalized, and sent of the optimal."""
    plugin = fsdp(state_dict_type="FULL_STATE_DICT")
    run = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=WAYS[way])
    dtype = torch.float64 if way == "fsdp2 and tp" else torch.float32
    ours = net().to(dtype)
    model, optimizer = run.prepare(ours, torch.optim.Muon(ours.parameters(), lr=0.02))
    counts, sent = [0], [0]
    plain, orthogonalize = dist.all_to_all_single, torch.optim._muon._zeropower_via_newtonschulz

    def count(*args: Any) -> Any:
        counts[0] += 1
        return orthogonalize(*args)

    def measure(into: Any, out: Any, come: list[int], go: list[int]) -> Any:
        sent[0] += sum(go) - go[dist.get_rank()]
        return plain(into, out, come, go)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", count)
        patch.setattr(dist, "all_to_all_single", measure)
        if dtype == torch.float64:  # products in parts are rounded otherwise, which bfloat16 would make much of
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
            patch.setattr(torch, "bfloat16", torch.float64)  # which torch 2.15 asks for instead
        alone = net().to(dtype)
        wanted = train(alone, torch.optim.Muon(alone.parameters(), lr=0.02), torch.Tensor.backward)
        counts[0] = 0
        got = train(model, optimizer, run.backward)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    assert_trained(run, model, alone.state_dict())
    total = torch.tensor(float(sent[0]))
    dist.all_reduce(total)
    momentum = 3 * sum(parameter.numel() for parameter in net().parameters())
    return counts[0], total.item() / (2 * momentum * (1 - 1 / dist.get_world_size()))


@world(4, quiet=20)
def test_each_matrix_is_orthogonalized_once_on_its_owner() -> None:
    """Of eight matrices each of four ranks takes two, and a gather and a scatter of momentum is sent."""
    count, ratio = check("fsdp2")
    assert count == 3 * 8 // 4
    assert ratio <= 1.05


@pytest.mark.parametrize("way", ["copies of shards", "fsdp2 and tp"])
@world(4, quiet=20)
def test_owners_gather_what_several_axes_cut(way: str) -> None:
    """Parts that are copied, or that tensor parallel cut before they were sharded, are put together alike."""
    counts = torch.tensor(check(way)[0])
    dist.all_reduce(counts)
    assert counts == 3 * 8
