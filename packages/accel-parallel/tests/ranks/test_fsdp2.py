"""Models sharded in place by FSDP2, against one process."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from several_ranks import COPIES, LAYERS, WHOLE, advance, assert_equal, bytes_kept, fsdp, refused
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.weights import load_model
from accel_core.errors import EngineUnavailableError, PreparationError
from accel_core.host.environ import patch_environment
from accel_core.mesh.tensor import whole
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.fsdp2.in_place import gloo_reduces
from accel_parallel.fsdp2.strategy import FullyShardStrategy
from accel_parallel.sharding.refusals import refuse_gloo
from accel_testing import requires, world
from accel_testing.conformance.strategy import CASES, Case, StrategyConformance

pytestmark = requires("torch:2.8")  # the first that computes in shards on a CPU


plugin = partial(fsdp, **WHOLE, **LAYERS)
"""Gives every rank whole states, and shards each layer by default."""


@pytest.mark.parametrize(("backend", "reduces"), [("gloo", True), ("cpu:gloo", False)])
@world(2)
def test_gradients_that_gloo_reduces_are_added_up(backend: str, reduces: bool) -> None:
    """Also those of a device: asked for an average, gloo leaves the sum in some versions; parts it does not gather."""
    ensure(backend=backend)
    assert gloo_reduces(torch.device("cpu"))
    on_gpu = replace(ensure(), device=torch.device("cuda", 0))
    assert gloo_reduces(on_gpu.device) == reduces
    with pytest.raises(EngineUnavailableError, match="got gloo for cuda") if reduces else nullcontext():
        refuse_gloo(on_gpu)


class TestSharded(StrategyConformance):
    """Each layer on its own, freed after its forward pass."""

    strategy = FullyShardStrategy
    sizes = (2,)
    given: ClassVar[dict[str, Any]] = {}

    def arguments(self) -> dict[str, Any]:
        """Return a plugin, which a way to shard changes."""
        return {"fsdp_plugin": plugin(**self.given)}


@pytest.mark.full("another case of a grid")
class TestShardedOnFour(TestSharded):
    """The same on four ranks."""

    sizes = (4,)


class Hybrid(TestSharded):
    """Copies of shards."""

    def arguments(self) -> dict[str, Any]:
        """Return a plugin, and axes of two ranks each."""
        return {"fsdp_plugin": plugin(reshard_after_forward=False), "parallelism_config": ParallelismConfig(**COPIES)}


WAYS: dict[str, dict[str, Any]] = {
    "in one piece, kept for the backward pass": {"auto_wrap_policy": "no_wrap", "reshard_after_forward": False},
    "in CPU memory that nobody pins": {"cpu_offload": True},
    "but for the last layer": {"ignored_modules": "2"},
}


def _all_cases(conformance: StrategyConformance, cases: tuple[Case, ...] = CASES) -> None:
    for case in cases:
        conformance._equals_one_process(case)
        reset_all()
    conformance._synchronises_late()
    reset_all()
    conformance._clips_elements()


@world(4)
def test_copies_of_shards_equal_one_process() -> None:
    """Two copies of two shards train as one process in every way to train."""
    _all_cases(Hybrid())


@pytest.mark.parametrize("way", WAYS)
@world(2)
def test_other_ways_to_shard_equal_one_process(way: str) -> None:
    """In one piece, offloaded, or with a part left out, a model trains as one process."""
    conformance = TestSharded()
    conformance.given = WAYS[way]  # type: ignore[misc]
    _all_cases(conformance, (CASES[2], CASES[4]))


class Block(nn.Module):
    """Two layers with dropout between them, and a scalar."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to what comes in."""
        y: torch.Tensor = x + self.down(self.drop(self.up(x).tanh()))
        return y


class Blocks(nn.Module):
    """A list of blocks, a head tied to the embedding, a scalar that trains, a frozen bias and a buffer."""

    def __init__(self, dropout: float = 0.0, *, scalar: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(())) if scalar else 1.0
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        y = self.embedding(x) + self.shift
        for layer in self.layers:
            y = layer(y)
        logits: torch.Tensor = self.head(y) * self.scale
        return logits


def _tokens() -> torch.Tensor:
    return torch.arange(8).reshape(4, 2) % 7


def _plain_steps(net: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    optimizer = _adamw(net)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(_tokens()).flatten(0, 1), _tokens().flatten())
        advance(loss, optimizer, model=net, clip=0.5)
    return dict(net.state_dict())


def _steps(accelerator: Accelerator, net: Any, optimizer: Any, steps: int) -> dict[str, torch.Tensor]:
    part = _tokens()[accelerator.process_index :: accelerator.num_processes]
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(part).flatten(0, 1), part.flatten())
        advance(loss, optimizer, run=accelerator, model=net, clip=0.5)
    return accelerator.get_state_dict(net)


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.05)


@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
@world(2)
def test_ties_scalars_frozen_and_buffers_train_as_one_process(order: str) -> None:
    """Blocks are found, what is tied stays tied, and an optimizer follows in any order of prepares."""
    accelerator = Accelerator(fsdp_plugin=plugin(auto_wrap_policy=None))
    net: Any = Blocks()
    optimizer: Any = _adamw(net)
    if order == "together":
        net, optimizer = accelerator.prepare(net, optimizer)
    elif order == "model first":
        net, optimizer = accelerator.prepare(net), accelerator.prepare(optimizer)
    else:
        optimizer, net = accelerator.prepare(optimizer), accelerator.prepare(net)
    assert [isinstance(layer, FSDPModule) for layer in net.layers] == [True] * 3
    assert net.head.weight is net.embedding.weight
    assert not isinstance(net.scale, DTensor)
    torch.testing.assert_close(_steps(accelerator, net, optimizer, 5), _plain_steps(Blocks(), 5), rtol=0, atol=1e-6)
    assert net.head.weight is net.embedding.weight


@world(2)
def test_only_the_first_rank_needs_the_weights() -> None:
    """Ranks with other weights, or with none, get those of rank 0, buffers and ties too."""
    for empty in (False, True):
        accelerator = Accelerator(fsdp_plugin=plugin(auto_wrap_policy=None, cpu_ram_efficient_loading=not empty))
        net: Any = Blocks()
        if not accelerator.is_main_process:
            net = net.to("meta") if empty else net
            net.head.weight = net.embedding.weight
            with torch.no_grad():
                for tensor in (*net.parameters(), *net.buffers()):
                    tensor.add_(1.0)
        optimizer = _adamw(net)
        net, optimizer = accelerator.prepare(net, optimizer)
        torch.testing.assert_close(_steps(accelerator, net, optimizer, 3), _plain_steps(Blocks(), 3), rtol=0, atol=1e-6)
        reset_all()


@world(3)
def test_a_rank_0_that_is_slow_after_sending_is_waited_for(tmp_path: Path) -> None:
    """It sends to each other rank, begins more than they do, and comes to the same save."""
    accelerator = Accelerator(fsdp_plugin=plugin(auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=True))
    accelerator.prepare(nn.Linear(6, 6))
    time.sleep(0.3 * accelerator.is_main_process)
    accelerator.save_state(tmp_path / "ckpt")


@world(4)
def test_copies_of_shards_get_the_weights_of_the_first_rank() -> None:
    """Of uneven and of empty parts, on ranks of either copy that had no weights, each holds its own."""
    shards = plugin(auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=True)
    accelerator = Accelerator(fsdp_plugin=shards, parallelism_config=ParallelismConfig(**COPIES))
    torch.manual_seed(3)
    net: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.BatchNorm1d(1))
    net[2].running_mean.fill_(7.0)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    net = accelerator.prepare(net if accelerator.is_main_process else net.to("meta"))
    assert_equal({name: whole(value) for name, value in net.state_dict().items()}, expected)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in net[0].parameters())


@world(2)
def test_dropout_is_drawn_again_in_recomputed_blocks() -> None:
    """With activation checkpointing, offloaded or not, gradients are those of the run without, and less is kept."""
    gradients, kept = [], []
    for settings in ({}, {"activation_checkpointing": True}, {"activation_checkpointing_offload": True}):
        settings = {"activation_checkpointing": True} | settings if settings else {}
        accelerator = Accelerator(fsdp_plugin=plugin(auto_wrap_policy=None, **settings))
        net = accelerator.prepare(Blocks(dropout=0.5))
        torch.manual_seed(11 + accelerator.process_index)
        with bytes_kept() as sizes:
            loss = net(_tokens()).square().sum()
        accelerator.backward(loss)
        gradients.append([p.grad.full_tensor() for p in net.layers.parameters()])
        kept.append(sum(sizes))
        assert list(accelerator.get_state_dict(net)) == list(Blocks().state_dict())
        reset_all()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)
    assert kept[1] < kept[0]


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@world(2)
def test_half_precision_keeps_masters_and_skips_together(word: str, dtype: torch.dtype) -> None:
    """Blocks compute in half precision, weights stay fp32, and an infinite gradient of one rank is skipped by all."""
    accelerator = Accelerator(mixed_precision=word, fsdp_plugin=plugin(auto_wrap_policy=None))
    net: Any = Blocks(scalar=False)
    net.layers[0].to(dtype)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    seen = []
    net.layers[1].up.register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
    before = accelerator.get_state_dict(net)
    loss = net(_tokens()).float().sum()
    assert seen == [dtype]
    accelerator.backward(loss * (float("inf") if word == "fp16" and accelerator.is_main_process else 1.0))
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    assert optimizer.step_was_skipped == (word == "fp16")
    same = [torch.equal(value, before[name]) for name, value in accelerator.get_state_dict(net).items()]
    assert all(same) if word == "fp16" else not all(same)


@pytest.mark.parametrize("regional", [True, pytest.param(False, marks=pytest.mark.full("compiled once more"))])
@world(2)
def test_compiled_models_are_sharded_too(regional: bool) -> None:
    """Blocks, or the whole, compile and train as one process; unwrapping gives the sharded model."""
    compilation = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    accelerator = Accelerator(fsdp_plugin=plugin(auto_wrap_policy=None), dynamo_plugin=compilation)
    net: Any = Blocks()
    optimizer = _adamw(net)
    net, optimizer = accelerator.prepare(net, optimizer)
    torch.testing.assert_close(_steps(accelerator, net, optimizer, 2), _plain_steps(Blocks(), 2), rtol=0, atol=1e-6)
    assert isinstance(accelerator.unwrap_model(net, keep_torch_compile=False), FSDPModule)


@world(2)
def test_several_models_and_one_that_is_not_trained() -> None:
    """Two models and a frozen one are sharded, each optimizer steps its own, and one clip covers both."""
    accelerator = Accelerator(fsdp_plugin=plugin())
    torch.manual_seed(1)
    first, second, frozen = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    frozen.requires_grad_(False)
    own = torch.optim.SGD(first.parameters(), lr=0.1)
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    first, second, own, other = accelerator.prepare(first, second, own, other)
    frozen = accelerator.prepare_model(frozen, evaluation_mode=True)
    assert all(isinstance(p, DTensor) for net in (first, second, frozen) for p in net.parameters())
    accelerator.backward(second(first(torch.ones(2, 4))).sum() + frozen(torch.ones(2, 4)).sum())
    norm = accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 1e-3)
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    before = first[0].weight.full_tensor()
    other.step()
    assert torch.equal(first[0].weight.full_tensor(), before)
    own.step()
    assert not torch.equal(first[0].weight.full_tensor(), before)


@pytest.mark.usefixtures("fresh_state")
def test_one_process_alone_shards_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process alone gets a group of one, and trains as without it."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(auto_wrap_policy=None))
    net: Any = Blocks()
    optimizer = _adamw(net)
    net, optimizer = accelerator.prepare(net, optimizer)
    assert isinstance(net, FSDPModule)
    torch.testing.assert_close(_steps(accelerator, net, optimizer, 2), _plain_steps(Blocks(), 2))
    accelerator.end_training()


@world(2)
def test_models_that_cannot_be_sharded_are_refused_first() -> None:
    """Errors are named, come on every rank at once, and leave the model as it was."""

    def refuses(match: str, net: nn.Module, **given: Any) -> None:
        reset_all()
        precision = given.pop("mixed_precision", "no")
        accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin(**given))
        with refused(PreparationError, match, accelerator, net):
            accelerator.prepare(net)

    refuses("meta device of rank 0", Blocks().to("meta"))
    refuses("scaler .* got parameters that are not sharded: scale", Blocks(), mixed_precision="fp16")
    single = nn.Linear(2, 2)
    refuses("no block was found", single, activation_checkpointing=True, auto_wrap_policy=None)
    reset_all()
    with (
        patch_environment(ACCELERATE_FP8_BACKEND="te"),
        pytest.raises(EngineUnavailableError, match=r"through torchao only; got .*TE"),
    ):
        Accelerator(fsdp_plugin=plugin(), mixed_precision="fp8")


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("version", [1, 2])
def test_plain_runs_continue_shards_and_shards_plain_runs(tmp_path: Path, version: int) -> None:
    """Two ranks, one plain process, two ranks: weights and moments are those of a run that was never stopped."""
    expected = _plain_steps(Blocks(scalar=False), 6)
    _two_ranks(tmp_path, version, "none", "first", scalar=False)
    accelerator = Accelerator(cpu=True)
    net: Any = Blocks(scalar=False)
    optimizer = _adamw(net)
    net, optimizer = accelerator.prepare(net, optimizer)
    accelerator.load_state(str(tmp_path / "first"))
    _steps(accelerator, net, optimizer, 2)
    accelerator.save_state(str(tmp_path / "second"))
    _two_ranks(tmp_path, version, "second", "third", scalar=False)
    reset_all()
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(Blocks(scalar=False))
    load_model(net, tmp_path / "third" / "model.safetensors")
    torch.testing.assert_close(dict(net.state_dict()), expected, rtol=0, atol=1e-6)


@world(2)
def _two_ranks(folder: Path, version: int, before: str, after: str, scalar: bool) -> None:
    given = {"use_orig_params": True} if version == 1 else {}
    accelerator = Accelerator(fsdp_plugin=fsdp(version, state_dict_type="FULL_STATE_DICT", **given))
    net: Any = Blocks(scalar=scalar)
    optimizer = _adamw(net)
    net, optimizer = accelerator.prepare(net, optimizer)
    if before != "none":
        accelerator.load_state(str(folder / before))
    _steps(accelerator, net, optimizer, 2)
    accelerator.save_state(str(folder / after))
    state = accelerator.get_state_dict(net)
    assert bool(state) or not accelerator.is_local_main_process


@pytest.mark.parametrize("version", [1, 2])
@world(2)
def test_an_optimizer_that_updates_inside_backward_is_refused(version: int) -> None:
    """It would update what is not reduced yet; the model stays as it was."""
    accelerator = Accelerator(fsdp_plugin=fsdp(version))
    net = nn.Linear(2, 2)
    library = pytest.importorskip("lomo_optim", reason="needs the library lomo_optim, not installed here")
    with pytest.raises(PreparationError, match="LOMO"):
        accelerator.prepare(net, library.Lomo(net, lr=0.1))
    assert type(net) is nn.Linear
