"""What goes wrong silently when ranks start apart, gradients are reduced by nobody, or only some ranks come."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import COPIES, advance, blocks, fsdp, logged, refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from accel_core.accelerator import Accelerator
from accel_core.comm.objects import gather_object
from accel_core.errors import ConfigurationError, PreparationError, RankDisagreementError, StateError
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.state import reset_all
from accel_testing import requires, world
from accel_testing.memory import MEASURES_MEMORY, Growth


class Net(nn.Module):
    """Two layers, a scalar and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers for numbers."""
        y: torch.Tensor = self.down(self.up(x).tanh()) * self.scale + self.shift
        return y


def _start(version: int, *, axes: ParallelismConfig | None = None, **given: Any) -> Accelerator:
    reset_all()
    plugin = fsdp(version, state_dict_type="FULL_STATE_DICT", **given)
    return Accelerator(fsdp_plugin=plugin, parallelism_config=axes)


def _own(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return what this rank computes with, not what a first rank gathers."""
    if isinstance(net, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(net):
            tensors = [*net.named_parameters(), *net.named_buffers()]
            return {name.replace("_fsdp_wrapped_module.", ""): value.detach().clone() for name, value in tensors}
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return {name: value.full_tensor() if isinstance(value, DTensor) else value.detach() for name, value in tensors}


def _input(accelerator: Accelerator) -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 4).sin() + accelerator.process_index


@pytest.mark.parametrize(
    ("version", "kind"),
    [(2, "shards"), (2, "copies"), (1, "FULL_SHARD"), (1, "NO_SHARD"), (1, "HYBRID_SHARD")],
)
@world(4)
def test_ranks_that_start_apart_train_as_the_first(version: int, kind: str) -> None:
    """Weights, scalars and buffers that differ between ranks, or between copies, start as those of rank 0."""
    hybrid = kind in ("copies", "HYBRID_SHARD")
    axes = ParallelismConfig(**COPIES) if hybrid else None
    given = {"sharding_strategy": kind, "use_orig_params": True} if version == 1 else {}
    accelerator = _start(version, axes=axes, **given)
    net = accelerator.prepare(Net(seed=accelerator.process_index))
    first = Net(seed=0)
    torch.testing.assert_close(_own(net), dict([*first.named_parameters(), *first.named_buffers()]), rtol=0, atol=0)


@world(2)
def test_one_different_bit_is_noticed() -> None:
    """A scalar that differs in its last bit on one rank starts as on rank 0."""
    accelerator = _start(2)
    net = Net()
    if not accelerator.is_main_process:
        with torch.no_grad():
            net.scale.copy_(torch.nextafter(net.scale, torch.ones(())))
    net = accelerator.prepare(net)
    assert len(set(gather_object([float(net.scale)]))) == 1


@world(2)
def test_whole_parameters_need_our_backward() -> None:
    """A step after loss.backward(), which averages no whole parameter, is refused and changes nothing."""
    accelerator = _start(2)
    net: Any = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = _own(net)
    net(_input(accelerator)).sum().backward()
    with pytest.raises(StateError, match=r"got a step after loss\.backward\(\)\. Call accelerator\.backward"):
        optimizer.step()
    torch.testing.assert_close(_own(net), before, rtol=0, atol=0)
    advance(net(_input(accelerator)).sum(), optimizer, run=accelerator)
    assert len(set(gather_object([float(net.scale)]))) == 1


@world(2)
def test_a_step_with_hooks_of_others() -> None:
    """An optimizer that has a hook of its own steps, the first time too."""
    accelerator = _start(2)
    net: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    accelerator.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()
    assert seen == [1]


@pytest.mark.parametrize("together", ["foreach", "fused"])
@world(2)
def test_whole_and_sharded_parameters_of_one_group_step(together: str) -> None:
    """Operations of torch on lists cannot mix them, so they step one by one, and settings stay as they were."""
    accelerator = _start(2, ignored_modules="up")
    net: Any = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1, **{together: True})
    net, optimizer = accelerator.prepare(net, optimizer)
    expected = Net()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1)
    for _ in range(2):
        advance(net(_input(accelerator)).square().mean(), optimizer, run=accelerator)
        inputs = torch.cat([_input(accelerator) - accelerator.process_index + rank for rank in range(2)])
        advance(expected(inputs).square().mean(), plain)
    torch.testing.assert_close(_own(net), dict([*expected.named_parameters(), *expected.named_buffers()]))
    assert [group[together] for group in optimizer.param_groups] == [True]


@world(2)
def test_clipping_finds_the_gradients_of_replaced_parameters() -> None:
    """Parameters listed before prepare clip as those of the prepared model."""
    accelerator = _start(2)
    net: Any = Net()
    listed = list(net.parameters())
    net = accelerator.prepare(net)
    norms = []
    for given in (listed, list(net.parameters())):
        net.zero_grad()
        accelerator.backward(net(_input(accelerator)).square().sum())
        norms.append(accelerator.clip_grad_norm_(given, 0.1))
        torch.testing.assert_close(accelerator.clip_grad_norm_(net.parameters(), 1.0), torch.tensor(0.1))
    assert torch.equal(*norms)
    accelerator.clip_grad_value_(listed, 0.01)
    assert float(net.down.bias.grad.full_tensor().abs().max()) <= 0.01
    accelerator = _start(1)
    flattened: Any = nn.Linear(4, 4)
    listed = list(flattened.parameters())
    flattened = accelerator.prepare(flattened)
    accelerator.backward(flattened(torch.ones(1, 4)).sum())
    accelerator.clip_grad_norm_(listed, 0.1)
    torch.testing.assert_close(accelerator.clip_grad_norm_(flattened.parameters(), 1.0), torch.tensor(0.1))


@requires("torch:2.8")  # the first that computes in shards on a CPU
@world(4)
def test_models_that_arrive_sharded() -> None:
    """One sharded over all ranks trains, its whole parameters too; one that leaves ranks out is refused."""
    accelerator = _start(2)
    net: Any = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)), ignored_params={net.scale})
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    accelerator.backward(net(_input(accelerator)).sum())
    optimizer.step()
    assert len(set(gather_object([float(net.scale)]))) == 1
    half: Any = Net()
    fully_shard(half, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], ignored_params={half.scale})
    with refused(PreparationError, r"all 4 processes.* got up\.weight .* mesh of shape \(2,\)", accelerator, half):
        accelerator.prepare(half)


@world(2)
def test_models_that_arrive_wrapped() -> None:
    """One wrapped whole, as the plugin says, trains, clips and gives its state; any other is refused by name."""
    accelerator = _start(1)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped.load_state_dict(state := {k: torch.ones_like(v) for k, v in expected.state_dict().items()})
    expected.load_state_dict(state)
    wrapped = FullyShardedDataParallel(wrapped, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer: Any = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(wrapped, optimizer)
    accelerator.backward(wrapped(torch.ones(1, 4)).sum())
    norm = accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
    optimizer.step()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 1.0))
    plain.step()
    state = accelerator.get_state_dict(wrapped)
    if accelerator.is_main_process:
        torch.testing.assert_close(state, dict(expected.state_dict()))
    inner: Any = nn.Sequential(
        FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), nn.Linear(4, 4)
    )
    with refused(PreparationError, "wrapped as a whole or not at all; got Sequential", accelerator, inner):
        accelerator.prepare(inner)
    for given, found in (
        ({"use_orig_params": False}, "got use_orig_params False and not True"),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, r"got strategy ShardingStrategy\.SHARD_GRAD_OP"),
    ):
        other = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), **given)
        with refused(PreparationError, found, accelerator, other):
            accelerator.prepare(other)


@MEASURES_MEMORY
@world(2)
def test_a_rank_without_weights_never_holds_the_model() -> None:
    """Where rank 0 alone loads, the other's memory grows by its half and a few blocks, not by the model."""
    accelerator = _start(2, cpu_ram_efficient_loading=True)
    accelerator.prepare(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)))
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    whole = sum(parameter.nbytes for parameter in net.parameters())
    growth = Growth()
    net = accelerator.prepare(net)
    grown = growth.most()
    if not accelerator.is_main_process:
        assert whole / 2 <= grown <= whole * 3 / 4, f"grew by {grown / whole:.2f} of the model"
    assert all(isinstance(p, DTensor) for p in net.parameters())


@world(2)
def test_a_wrapped_model_is_not_copied() -> None:
    """Without the plugin, a model that version 1 wraps is refused by name; one of version 2 keeps its layout."""
    accelerator = Accelerator()
    net = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with refused(PreparationError, r"sharded at its root\. Pass fsdp_plugin", accelerator, net):
        accelerator.prepare(net)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("verb", ["get_state_dict", "save_model"])
@world(2)
def test_what_only_the_first_rank_asks_names_the_other(verb: str, version: int, tmp_path: Path) -> None:
    """Gathering or saving on a part of the ranks is an error on all of them, with where each is; nothing hangs."""
    accelerator = _start(version)
    net = accelerator.prepare(nn.Linear(4, 4))
    arguments = {"get_state_dict": (net,), "save_model": (net, tmp_path / "model")}[verb]
    gather = getattr(accelerator, verb)
    act = partial(gather, *arguments) if accelerator.is_main_process else accelerator.wait_for_everyone
    with pytest.raises(RankDisagreementError, match=r"rank 1: wait_for_everyone"):
        act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_device_maps_and_optimizers_of_other_models_are_refused(version: int) -> None:
    """A model that a device map spreads stays as it was; a step that nobody would average changes nothing."""
    accelerator = _start(version, use_orig_params=True if version == 1 else None)
    spread: Any = Net()
    spread.hf_device_map = {"up": "cpu", "down": 1}
    with refused(PreparationError, r"device map spreads .* got the devices 1, cpu", accelerator, spread):
        accelerator.prepare(spread)
    stray = nn.Parameter(torch.ones(3))
    _, optimizer = accelerator.prepare(nn.Linear(2, 2), torch.optim.SGD([stray], lr=0.1))
    stray.grad = torch.ones(3)
    with pytest.raises(PreparationError, match=r"of no prepared model.* shape \(3,\)"):
        optimizer.step()
    assert torch.equal(stray, torch.ones(3))


class Experts(nn.Module):
    """A router, and experts in one stacked parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.Parameter(torch.rand(2, 4, 4))


@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_experts_of_each_rank_are_not_those_of_the_first(version: int) -> None:
    """Experts that ranks divide among them are refused, also where rank 0's weights are sent; each keeps its own."""
    for asked in (False, True):
        accelerator = _start(version, cpu_ram_efficient_loading=asked)
        net, rank = Experts(), accelerator.process_index
        mesh = init_device_mesh("cpu", (2,))
        held = DTensor.from_local(torch.full((1, 4, 4), float(rank)), mesh, [Shard(0)])
        net.experts = nn.Parameter(held)
        with refused(ConfigurationError, r"sharded.* got Experts", accelerator, net):
            accelerator.prepare(net)
        assert net.experts.to_local().eq(rank).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_what_neither_version_does_is_refused(version: int) -> None:
    """Unknown classes, packed weights, uneven inputs and axes without shards are named, and nothing was changed."""
    accelerator, net = _start(version, **blocks("Nobody", "Net")), Net()
    with refused(ConfigurationError, r"got \['Nobody'\]\. Use some of \['Linear', 'Net'\]", accelerator, net):
        accelerator.prepare(net)
    accelerator = _start(version)
    for bits in (8, 4):
        packed: Any = nn.Linear(2, 2)
        setattr(packed, f"is_loaded_in_{bits}bit", True)
        with refused(PreparationError, f"got Linear in {bits} bits on cpu", accelerator, packed):
            accelerator.prepare(packed)
    prepared = accelerator.prepare(nn.Linear(4, 4))
    with (
        pytest.raises(PreparationError, match=r'cannot join processes .*uneven_end="empty"'),
        accelerator.join_uneven_inputs([prepared]),
    ):
        pass
    with pytest.raises(ConfigurationError, match=r"got the axes \['dp_replicate'\].*dp_shard_size"):
        _start(version, axes=ParallelismConfig(dp_replicate_size=2))


@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_the_plan_is_logged(version: int) -> None:
    """The first rank logs blocks; a model in one piece is a warning."""
    lines = logged("accel_parallel.sharding.wrapping")
    plugin = fsdp(version, use_orig_params=True if version == 1 else None)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    accelerator.prepare(nn.Linear(2, 2))
    if not accelerator.is_main_process:
        assert lines == []
        return
    said = [line.getMessage() for line in lines]
    assert said[0] == "Sequential is sharded in 2 blocks (Linear) and a rest."
    assert said[1].startswith("Linear is sharded as one piece")
    assert lines[1].levelno == logging.WARNING
