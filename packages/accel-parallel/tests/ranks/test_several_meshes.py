"""A model whose parameters lie on several meshes, or whole: one norm, and one checkpoint, on any number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Sharded, everything
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.checkpoint.weights import load_model, save_model
from accel_core.mesh.tensor import whole
from accel_core.process.world import ensure
from accel_parallel.sharding.format import FullyShardedFormat
from accel_parallel.sharding.gather import gather
from accel_parallel.sharding.gradients import clip_norm, clip_value
from accel_testing import requires, world

pytestmark = requires("torch:2.8")  # the first that computes in shards on a CPU

NORMS = (1.0, 2.0, float("inf"))


class Mixture(nn.Module):
    """Experts in one parameter, a dense layer, and a scale of which every rank keeps all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts = nn.Parameter(torch.randn(8, 3, 5))
        self.shared = nn.Parameter(torch.randn(8, 2))
        self.dense = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.randn(()))
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter)


def spread(model: Mixture, size: int) -> None:
    """Spread experts over pairs of ranks, copied, and in pieces of pieces; the dense layer over all ranks."""
    ensure()
    if size == 1:
        return
    ep = 2
    pairs = init_device_mesh("cpu", (size // ep, ep), mesh_dim_names=("efsdp", "ep"))
    everyone = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    ways: dict[str, tuple[Any, list[Placement]]] = {
        "experts": (pairs["ep"], [Shard(0)]),
        "shared": (pairs, [_StridedShard(0, split_factor=ep) if size > ep else Replicate(), Shard(0)]),
        "dense.weight": (everyone, [Shard(0)]),
        "dense.bias": (everyone, [Shard(0)]),
    }
    for name, (mesh, placements) in ways.items():
        owner, _, own = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        given = getattr(module, own)
        parts = [_cut(each.detach(), mesh, placements) for each in (given, given.grad)]
        module._parameters[own] = nn.Parameter(parts[0])
        module._parameters[own].grad = parts[1]


def _cut(tensor: torch.Tensor, mesh: Any, placements: list[Placement]) -> torch.Tensor:
    """Return this rank's part of a tensor that all ranks hold, cut along the last axis first, as FSDP2 does."""
    everywhere: Any = distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)
    for axis in reversed(range(mesh.ndim)):
        aim = [placements[each] if each >= axis else Replicate() for each in range(mesh.ndim)]
        everywhere = everywhere.redistribute(placements=aim)
    found: torch.Tensor = everywhere
    return found


FORMAT = FullyShardedFormat("SHARDED_STATE_DICT", lambda own, keep: gather(own.state_dict(), keep=keep))


def trained(seed: int, size: int) -> BareRun:
    """Return a run after a step, one parameter after the other."""
    model = Mixture(seed)
    spread(model, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    optimizer.step()
    return BareRun([model], [optimizer], strategy=Sharded(FORMAT))


def clipped(size: int) -> None:
    """Compare norms, and gradients once they are clipped, with those of the whole model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that it takes two steps where one rank's part has two cuts
        for p in NORMS:
            plain, model = Mixture(), Mixture()
            spread(model, size)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=p)
            torch.testing.assert_close(clip_norm(model.parameters(), 0.5, p), expected)
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(whole(one.grad), other.grad)
        torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        clip_value(model.parameters(), 0.01)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad)


@world(4)
def _saved(folder: Path, size: int) -> None:
    """Save a run in shards, its model whole in one file, and what one process has."""
    clipped(size)
    own = trained(1, size)
    save_state(own, folder / "shards")
    save_model(own.models[0], None, folder / "model")
    if own.world.rank == 0:
        torch.save(everything(trained(1, 1)), folder / "expected.pt")


def loaded(folder: Path, size: int, before: str, after: str) -> None:
    """Read a run in shards on another number of ranks, bit-equal, and save it again."""
    expected = torch.load(folder / "expected.pt", weights_only=True)
    own = trained(2, size)
    report = load_state(own, folder / before)
    assert set(report.restored) >= {"model 0", "optimizer 0"}
    torch.testing.assert_close(everything(own), expected, rtol=0, atol=0)
    alone = Mixture(3)
    load_model(alone, folder / "model")
    state = dict(alone.state_dict())
    torch.testing.assert_close(state, {name: expected[name] for name in state}, rtol=0, atol=0)
    save_state(own, folder / after)


@world(2)
def test_a_rank_without_the_widest_format_knows_the_norm() -> None:
    """Of two parameters the second rank has a part of the one in bfloat16 alone, and of three frozen bytes too."""
    ensure()
    mesh = init_device_mesh("cpu", (2,))
    plain = [
        nn.Parameter(torch.full((size,), 3.0, dtype=dtype)) for size, dtype in ((1, torch.float32), (4, torch.bfloat16))
    ]
    spread_out = [nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(0)])) for each in plain]
    for one, other in zip(plain, spread_out, strict=True):
        one.grad, other.grad = one.detach().clone(), other.detach().clone()
    packed = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    torch.testing.assert_close(clip_norm([packed, *spread_out], 0.5, 2.0), expected, rtol=1e-2, atol=0)
    for one, other in zip(plain, spread_out, strict=True):
        torch.testing.assert_close(whole(other.grad), one.grad, rtol=1e-2, atol=0)


@pytest.mark.usefixtures("fresh_state")
def test_several_meshes_have_one_norm_and_one_checkpoint(tmp_path: Path) -> None:
    """On four ranks every shard counts once, and is saved once; two ranks, and then one, read it bit for bit."""
    _saved(tmp_path, 4)
    world(2)(loaded)(tmp_path, 2, "shards", "again")
    loaded(tmp_path, 1, "again", "once more")
