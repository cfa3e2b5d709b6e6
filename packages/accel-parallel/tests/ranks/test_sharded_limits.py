"""What a sharded model cannot do is refused by name, and the way that the error names gives what one process gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_ranks import LAYERS, advance, assert_trained, fsdp, refused, split
from torch import nn
from torch.optim.swa_utils import AveragedModel

from accel_core.accelerator import Accelerator
from accel_core.errors import EngineUnavailableError, PreparationError, TorchVersionError
from accel_core.host.versions import is_torch_version
from accel_testing import requires, world


class Net(nn.Module):
    """Layers, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layers make."""
        y: torch.Tensor = x * self.scale + self.layers(x)
        return y


def accelerator(version: int, **given: Any) -> Accelerator:
    """Return an Accelerator that shards each layer."""
    return Accelerator(cpu=True, fsdp_plugin=fsdp(version, **LAYERS | {"state_dict_type": "FULL_STATE_DICT"} | given))


PARTS = {"layers.0": "colwise", "layers.2": "rowwise"}


def batches() -> torch.Tensor:
    """Return three batches of four rows, the same on all ranks."""
    return torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))


@requires("torch:2.8")
@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_a_copy_is_refused_and_one_from_before_averages(version: int) -> None:
    """A deepcopy and an AveragedModel are refused after `prepare`; made before, the average is that of one process."""
    alone, ours = Net(), Net()
    mean, averaged = AveragedModel(alone), AveragedModel(ours)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    run = accelerator(version)
    net, sharded, average = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1), averaged)
    error, words = EngineUnavailableError, r"cannot be copied; got a F\w+\. Copy it"
    if version == 2:
        error, words = AssertionError, "not support deepcopy"
    for copied in (copy.deepcopy, AveragedModel):
        with pytest.raises(error, match=words):
            copied(net)
    for batch in batches():
        advance(alone(batch).square().mean(), optimizer)
        advance(net(batch.chunk(2)[dist.get_rank()]).square().mean(), sharded, run=run)
        mean.update_parameters(alone)
        run.unwrap_model(average).update_parameters(net)
    assert_trained(run, average, mean.state_dict())


@requires("torch:2.8")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("policy", ["size_based_wrap", "no_wrap"])
@world(2)
def test_gradients_of_gradients_are_refused(version: int, policy: str) -> None:
    """A penalty on gradients ended the process by a read of freed weights; now the first pass is refused by name."""
    run = accelerator(version, auto_wrap_policy=policy)
    net = run.prepare(Net())
    batch = batches()[0].requires_grad_()
    with pytest.raises(EngineUnavailableError, match=r"freed in between; got create_graph=True\. Train without FSDP"):
        torch.autograd.grad(net(batch).sum(), batch, create_graph=True)
    if version == 2 and not is_torch_version(">=", "2.13"):  # FSDP2 of an older torch is of no use after a failed pass
        return
    torch.autograd.grad(net(batch).sum(), batch)
    run.backward(net(batch).sum())
    assert all(parameter.grad is not None for parameter in net.parameters() if parameter.numel())


@requires("torch:2.8")
@pytest.mark.parametrize("assign", [False, True])
@world(2)
def test_whole_weights_are_loaded_into_shards(assign: bool) -> None:
    """`load_state_dict` of whole weights fills the shards, which train on from there as one process does."""
    alone, ours = Net(), Net()
    state = {name: value.sin() + 1 for name, value in alone.state_dict().items()}
    alone.load_state_dict(state)
    run = accelerator(2)
    net, sharded = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        net.load_state_dict({**state, "scale": torch.ones(7)})
    net.load_state_dict(state, assign=assign)
    if assign:
        sharded = run.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches():
        advance(alone(batch).square().mean(), optimizer)
        advance(net(batch.chunk(2)[dist.get_rank()]).square().mean(), sharded, run=run)
    assert_trained(run, net, alone.state_dict())


@world(2)
def test_whole_weights_are_loaded_into_split_layers() -> None:
    """The same for layers that two ranks split: each takes its part of what is loaded."""
    run = Accelerator(cpu=True, parallelism_config=split(PARTS))
    net = run.prepare(Net())
    state = {name: value.sin() + 1 for name, value in Net().state_dict().items()}
    net.load_state_dict(state)
    assert_trained(run, net, state, atol=0)


@requires("torch:2.8")
@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_sparse_gradients_are_refused_before_anything_changed(version: int) -> None:
    """A layer with sparse gradients is named by `prepare`, and the model stays as it is; FSDP2 takes a frozen one."""
    run = accelerator(version, auto_wrap_policy="no_wrap")
    net = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with refused(PreparationError, r"got sparse=True in 0\. Set sparse=False", run, net):
        run.prepare(net)
    if version == 2:
        net[0].requires_grad_(False)
        run.backward(run.prepare(net)(torch.arange(8)).sum())


@requires("torch:2.8")
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "tp"])
@world(2)
def test_a_model_that_no_rank_has_weights_of_is_refused(engine: str) -> None:
    """Every rank names the way before anything changed, and what it names trains."""
    if engine == "tp":
        run = Accelerator(cpu=True, parallelism_config=split(PARTS))
    else:
        run = Accelerator(cpu=True) if engine == "ddp" else accelerator(int(engine[4]))
    with torch.device("meta"):
        net = Net()
    with refused(PreparationError, r"got Net .*the meta device.*model\.to_empty\(device=\"cpu\"\)", run, net):
        run.prepare(net)
    net.to_empty(device="cpu").load_state_dict(Net().state_dict())
    prepared = run.prepare(net)
    torch.testing.assert_close(prepared(torch.ones(1, 6)), Net()(torch.ones(1, 6)))


@pytest.mark.skipif(is_torch_version(">=", "2.8"), reason="this torch shards in place on a CPU")
@world(2)
def test_sharding_in_place_is_refused_where_torch_cannot() -> None:
    """Experts that ranks use unevenly are not mixed on an old torch either: nothing is sharded."""
    run, net = Accelerator(cpu=True, fsdp_plugin=fsdp()), nn.Linear(2, 2)
    with refused(TorchVersionError, r"got torch .* Install torch 2\.8 or later, or use fsdp_version=1", run, net):
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
