"""Models made without memory: their values are those of one process, whatever the ranks and the way to share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_ranks import COPIES, assert_equal, blocks, fsdp, split
from torch import Tensor, nn

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError, RemoteRankError
from accel_core.mesh.tensor import local_part
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.state import reset_all
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_testing import requires, world
from accel_testing.memory import MEASURES_MEMORY, Growth

WAYS = {2: ("ddp", "fsdp2", "tp", "pp"), 4: ("fsdp2", "hsdp", "fsdp2 and tp", "pp and fsdp2")}


class Norm(nn.Module):
    """A layer of one's own, with a buffer that counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with ones, and from zero."""
        nn.init.ones_(self.weight)
        self.calls.zero_()

    def forward(self, values: Tensor) -> Tensor:
        """Scale."""
        return values * self.weight


class Block(nn.Module):
    """Attention, whose reset reaches into a layer inside of it, and two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = Norm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """Add what the layers make of values."""
        values = values + self.attention(values, values, values, need_weights=False)[0]
        found: Tensor = values + self.down(torch.tanh(self.up(self.norm(values))))
        return found


class Net(nn.Module):
    """Blocks between an embedding and a layer that is tied to it."""

    kind: Any = nn.BatchNorm1d

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = self.kind(8)
        self.leave = nn.Linear(8, 13, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of each token."""
        values = self.enter(tokens)
        for block in self.blocks:
            values = block(values)
        found: Tensor = self.leave(self.scale(values.mT).mT)
        return found


class Stages(Net):
    """The same with a norm of single samples, as pipelines have it."""

    kind = Norm


def language_model() -> nn.Module:
    """Return a model of transformers, whose blocks initialize layers inside of them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def arguments(way: str, block: str = "Block") -> dict[str, Any]:
    """Return what makes an Accelerator share a model in one of the ways."""
    found: dict[str, Any] = {}
    if "fsdp" in way or way == "hsdp":
        version = 1 if way == "fsdp1" else 2
        found["fsdp_plugin"] = fsdp(version, state_dict_type="FULL_STATE_DICT", **blocks(block))
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    axes: dict[str, Any] = {"hsdp": COPIES, "pp": {"pp_size": 2}, "ep": {"ep_size": 2}}
    axes |= {"pp and fsdp2": {"pp_size": 2, "dp_shard_size": 2}}
    if way in axes:
        found["parallelism_config"] = ParallelismConfig(**axes[way])
    if way.endswith("tp"):
        found["parallelism_config"] = split(plan, dp_shard_size=2 if "fsdp" in way else 1)
    if way.startswith("pp"):
        found["kwargs_handlers"] = [PipelineKwargs(loss_fn=lambda out, _: out.square().mean(), microbatches=2)]
    return found


def started(way: str, make: Any = Net, seed: int = 0) -> dict[str, Tensor]:
    """Return the first values of a model that is made without memory; under FSDP, on the first rank."""
    run = Accelerator(cpu=True, **arguments(way, "GPT2Block" if make is language_model else "Block"))
    torch.manual_seed(dist.get_rank())  # of no effect
    before = torch.random.get_rng_state()
    with run.empty_init(seed):
        model = make()
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    assert torch.equal(torch.random.get_rng_state(), before)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(each) for each in model.parameters()} == {id(each) for each in own}
    state = {name: value.clone() for name, value in run.get_state_dict(model).items()}
    reset_all()
    return state


def alone(make: Any = Net, seed: int = 0) -> dict[str, Tensor]:
    """Return the first values in one process, which knows of no others."""
    from accel_core.modules import empty

    with empty.empty_init(seed):
        model = make()
    empty.check(model)
    empty.initialize(model, torch.device("cpu"))
    return dict(model.state_dict())


def check(size: int, make: Any = Net) -> None:
    """Check that every way gives the values of one process, bit for bit."""
    for way in WAYS[size]:
        if make in (Net, Stages):
            make = Stages if way.startswith("pp") else Net
        wanted = alone(make)
        if make is language_model and "tp" in way:
            continue  # its layers have other names
        got = started(way, make)
        if got:
            assert_equal(wanted, got)


@requires("torch:2.8")
@world(2, quiet=20)
def test_values_are_those_of_one_process() -> None:
    """On copies, in shards and in parts, values are those of one process, bit for bit; another seed gives others."""
    check(2)
    assert not torch.equal(alone(seed=1)["enter.weight"], alone()["enter.weight"])


@requires("torch:2.8", "transformers")
@world(2, quiet=60, preload=("transformers.modeling_utils",))
def test_models_of_transformers_initialize_their_layers() -> None:
    """So are the values that `_init_weights` of a model gives to layers, and to those inside of its blocks."""
    check(2, language_model)
    deep = alone(language_model)
    ratio = deep["transformer.h.0.mlp.c_proj.weight"].std() / deep["transformer.h.0.mlp.c_fc.weight"].std()
    assert 0.35 < float(ratio) < 0.65  # of two layers, the ones that add up are scaled by half


@requires("torch:2.10")
@world(4, quiet=20)
def test_values_do_not_depend_on_the_mesh() -> None:
    """Neither do they on copies of shards, nor on shards of parts."""
    check(4)


@requires("torch:2.8")
@world(2, quiet=20)
def test_a_stage_makes_its_own_values_and_trains() -> None:
    """A rank of a pipeline has no memory for the other's block, and after a step the weights are those of one."""
    plain, tokens = Stages(), torch.arange(32).view(4, 8) % 13
    plain.load_state_dict(alone(Stages))
    plain(tokens).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    run = Accelerator(cpu=True, **arguments("pp"))
    with run.empty_init():
        model = Stages()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = [sum(each.untyped_storage().nbytes() for each in block.parameters()) for block in model.blocks]
    other = model.blocks[1 - dist.get_rank()]
    assert held[1 - dist.get_rank()] == 4 * len([*other.parameters()]) < held[dist.get_rank()]
    run.backward(model(tokens).loss)
    optimizer.step()
    trained = run.get_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6)


@MEASURES_MEMORY
@pytest.mark.parametrize("way", ["fsdp2", "tp"])
@requires("torch:2.8")
@world(4, quiet=30)
def test_a_model_of_four_times_a_rank_s_memory_starts(way: str) -> None:
    """A rank holds its shard and one module at most, within a tenth; without empty_init it holds the whole model."""
    width, layers = 2048, 24
    given = arguments(way, "Linear")
    if way == "tp":
        plan = {f"{each}": "colwise_gather_output" for each in range(layers)}
        given["parallelism_config"] = split(plan, tp_size=4)
    run = Accelerator(cpu=True, **given)

    def start(width: int) -> nn.Module:
        with run.empty_init():
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        return run.prepare(model)

    start(8)  # what is imported late
    layer = width * width * torch.float32.itemsize
    growth = Growth()
    model = start(width)
    ratio = growth.most() / (layers * layer / 4 + layer)
    assert ratio <= 1.1, ratio
    assert sum(local_part(each).numel() for each in model.parameters()) * torch.float32.itemsize == layers * layer / 4


class Read(nn.Module):
    """A module that reads a value where it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [float(each) for each in torch.linspace(0, 1, 3)]


class Written(nn.Module):
    """A module that writes a value where it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.bias.data.fill_(1)


class Bare(nn.Module):
    """A module without a method that gives it its values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Forgets(Norm):
    """A module that gives no value to its buffer."""

    def reset_parameters(self) -> None:
        """Start with ones."""
        nn.init.ones_(self.weight)


@requires("torch:2.8")
@world(2)
def test_what_would_have_no_value_is_refused_by_name() -> None:
    """Modules that read or write values where they are made, or have nobody who makes them, and other ways to train."""
    run = Accelerator(cpu=True, **arguments("fsdp2"))
    for make, fault in (
        (Read, "got a module that reads a value"),
        (Written, "got a module that writes a parameter by fill_"),
    ):
        with pytest.raises(PreparationError, match=fault), run.empty_init():
            nn.Sequential(nn.Linear(4, 4), make())
    with run.empty_init():
        bare, forgets, mixed, model = nn.Sequential(Bare(), nn.Linear(4, 4)), Forgets(4), nn.Linear(4, 4), Block()
    mixed.bias = nn.Parameter(torch.zeros(4))
    reset_all()
    run = Accelerator(cpu=True)
    with pytest.raises(PreparationError, match="or a placement by hand, does not initialize a model; got Block"):
        run.prepare(model, device_placement=[False])
    for net, fault in ((bare, r"none for 0 \(Bare\)\."), (mixed, "some in bias"), (forgets, r"none for calls\.")):
        with pytest.raises(PreparationError, match=fault):
            run.prepare(net)
    reset_all()
    for way in ("fsdp1", "ep"):
        run = Accelerator(cpu=True, **arguments(way))
        with pytest.raises(PreparationError, match="does not initialize a model; got Block, made under empty_init"):
            run.prepare(model)
        assert all(each.is_meta for each in model.parameters())
        reset_all()
    run = Accelerator(cpu=True, **arguments("pp"))
    with run.empty_init():
        model = Stages()
        model.blocks[1].norm = Forgets(8)
    error = (PreparationError, RemoteRankError)[1 - dist.get_rank()]
    with pytest.raises(error, match=r"none for blocks\.1\.norm\.calls"):
        run.prepare(model)
    reset_all()
    for way in ("fsdp2", "pp"):
        run = Accelerator(cpu=True, **arguments(way))
        with run.empty_init(seed=dist.get_rank()):
            model = Stages()
        with pytest.raises(PreparationError, match=r"made otherwise on the ranks \[1\] than on rank 0"):
            run.prepare(model)
        reset_all()
