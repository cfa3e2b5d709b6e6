"""FSDP on a GPU, in a group of one over nccl: it trains, saves and averages as plain PyTorch does there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Net, advance
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.weights import load_model
from accel_core.errors import ConfigurationError, PreparationError
from accel_core.mesh.tensor import local_part
from accel_core.modules import empty
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.fp8 import AORecipeKwargs
from accel_core.plugins.handlers import GradScalerKwargs
from accel_core.process import world
from accel_core.state import reset_all
from accel_parallel.fsdp2.in_place import arguments_of
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding.optimizers import row_of

DEVICE = torch.device("cuda", 0)
WAYS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "kept": {"reshard_after_forward": False},
    "recomputed": {"activation_checkpointing": True},
    "inputs offloaded": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    "offloaded": {"cpu_offload": True},
}
ALL = [(2, way) for way in WAYS] + [(1, way) for way in ("blocks", "recomputed")]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),  # of FSDP1 in one process
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),  # of its flattened parameters
    pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning"),  # torchao 0.18
]


@pytest.fixture(autouse=True)
def leaves_the_group() -> Iterator[None]:
    """Leave the group of one at the end of a test."""
    yield
    world.destroy()


SIZES = {"entry": 32, "width": 64, "out": 8, "count": 2}


def net(seed: int = 0) -> Net:
    """Return a net with the same values each time."""
    torch.manual_seed(seed)
    return Net(**SIZES)


def rows(steps: int = 4) -> Tensor:
    """Return a batch on the device for each step."""
    return torch.randn(steps, 16, 32, generator=torch.Generator().manual_seed(7)).to(DEVICE)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that shows gradients of a wrong size by its clipping alone."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def accelerator(version: int = 2, way: str = "blocks", kind: str = "FULL_STATE_DICT", **given: Any) -> Accelerator:
    """Return an Accelerator that shards block by block in one of the ways."""
    blocks: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
    }
    blocks |= {"use_orig_params": True} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **blocks | WAYS[way])
    return Accelerator(fsdp_plugin=plugin, **given)


def plain(model: nn.Module, optimizer: Any, steps: Tensor, parts: int = 1, clip: float | None = None) -> None:
    """Train as PyTorch does, each batch in parts."""
    for batch in steps:
        for part in batch.chunk(parts):
            (model(part).square().mean() / parts).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def train(run: Accelerator, model: nn.Module, optimizer: Any, steps: Tensor, clip: float | None = None) -> None:
    """Train through an Accelerator, each batch in as many parts as it accumulates."""
    for batch in steps:
        for part in batch.chunk(run.gradient_accumulation_steps):
            with run.accumulate(model):
                advance(model(part).square().mean(), optimizer, run=run, model=model, clip=clip)


def state(run: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of whole weights, on the CPU."""
    return {name: value.clone().cpu() for name, value in run.get_state_dict(model).items()}


def close(found: dict[str, Tensor], model: nn.Module, atol: float = 1e-6) -> None:
    """Compare with the weights of a plain model."""
    wanted = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(("version", "way"), ALL)
def test_training_equals_the_plain_model(version: int, way: str) -> None:
    """With accumulation and clipping, weights are those of the plain model, and lie where they were asked to."""
    run = accelerator(version, way, gradient_accumulation_steps=2)
    twin, ours = net().to(DEVICE), net()
    plain(twin, adam(twin), rows(), parts=2, clip=0.05)
    model, optimizer = run.prepare(ours, adam(ours))
    train(run, model, optimizer, rows(), clip=0.05)
    close(state(run, model), twin, 1e-5 if way == "offloaded" else 1e-6)
    kind = "cpu" if way == "offloaded" else DEVICE.type
    assert {local_part(each).device.type for each in model.parameters()} == {kind}


@pytest.mark.parametrize("way", ["blocks", "recomputed", "offloaded"])
def test_bf16_is_that_of_fully_shard_by_hand(way: str) -> None:
    """Outputs and weights are those of the policy of the plugin, given to fully_shard, under autocast."""
    run = accelerator(2, way, mixed_precision="bf16")
    ours, twin = net(), net().to(DEVICE)
    model, optimizer = run.prepare(ours, adam(ours))
    strategy: Any = run._runtime.strategy
    settings = arguments_of(strategy.plugin, init_device_mesh(DEVICE.type, (1,)), DEVICE)
    assert settings["mp_policy"].param_dtype == torch.bfloat16
    for block in (*twin.blocks, twin):
        fully_shard(block, **settings)
    plainly = adam(twin)
    for batch in rows():
        with torch.autocast(DEVICE.type, torch.bfloat16):
            output = twin(batch)
        advance(output.float().square().mean(), plainly)
        found = model(batch)
        torch.testing.assert_close(found, output, rtol=0, atol=1e-6)
        advance(found.float().square().mean(), optimizer, run=run)


@pytest.mark.parametrize("way", ["blocks", "offloaded"])
def test_a_step_that_overflows_in_fp16_is_skipped(way: str) -> None:
    """It changes no weight and halves the scale, wherever gradients lie; the other steps train."""
    run = accelerator(2, way, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    ours = net()
    model, optimizer = run.prepare(ours, adam(ours))
    for step, batch in enumerate(rows()):
        before = state(run, model)
        advance(model(batch).square().mean() * (1e38 if step == 2 else 1), optimizer, run=run, model=model, clip=1.0)
        assert run.optimizer_step_was_skipped == (step == 2)
        after = state(run, model)
        assert all(torch.equal(before[name], after[name]) for name in before) == (step == 2)
    assert run.scaler is not None
    assert run.scaler.get_scale() == 512.0


def test_fsdp1_offloads_nothing_that_no_rank_shares_out() -> None:
    """One process holds all of it, and torch then trains other weights."""
    with pytest.raises(ConfigurationError, match=r"got cpu_offload and ShardingStrategy\.FULL_SHARD on 1"):
        accelerator(1, "offloaded")


def test_fsdp1_trains_in_bf16() -> None:
    """Weights stay near those of the plain model in float32, and are no closer than bf16 is."""
    run = accelerator(1, mixed_precision="bf16")
    ours, twin = net(), net().to(DEVICE)
    plain(twin, torch.optim.SGD(twin.parameters(), lr=0.1), rows())
    model, optimizer = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    train(run, model, optimizer, rows())
    found = state(run, model)
    assert {value.dtype for value in found.values()} == {torch.float32}
    close(found, twin, 1e-2)
    assert any(not torch.equal(found[name], value.cpu()) for name, value in twin.state_dict().items())


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of what it traces
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_training_equals_the_plain_model(version: int, regional: bool) -> None:
    """The same where the model, or each block, is compiled."""
    compiles = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    run = accelerator(version, dynamo_plugin=compiles)
    twin, ours = net().to(DEVICE), net()
    plain(twin, torch.optim.SGD(twin.parameters(), lr=0.1), rows())
    model, optimizer = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    train(run, model, optimizer, rows())
    close(state(run, model), twin, 1e-5)


def test_fp8_trains_shards_as_it_trains_the_whole() -> None:
    """Layers that torchao converts train in shards near what they train whole, and another than in bf16."""
    float8: Any = pytest.importorskip("torchao.float8")
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("this GPU has no fp8; Ada and Hopper have")
    found = []
    for way, precision in (("whole", "fp8"), ("shards", "fp8"), ("shards", "bf16")):
        recipe = AORecipeKwargs(config=float8.Float8LinearConfig(emulate=DEVICE.type == "cpu"))
        given: dict[str, Any] = {"mixed_precision": precision}
        given |= {"kwargs_handlers": [recipe]} if precision == "fp8" else {}
        run, ours = accelerator(**given) if way == "shards" else Accelerator(**given), net()
        model, optimizer = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
        train(run, model, optimizer, rows())
        found.append(state(run, model)["blocks.0.layer.weight"])
        reset_all()
    whole, shards, half = found
    assert (shards - whole).norm() < (half - whole).norm()


OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "SGD fused": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
    "AdamW of one by one": lambda given: torch.optim.AdamW(given, lr=0.01, foreach=False),
    "Adam capturable": lambda given: torch.optim.Adam(given, lr=0.01, capturable=DEVICE.type == "cuda"),
    "Muon": lambda given: torch.optim.Muon(given, lr=0.01),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_the_plain_model(version: int, name: str) -> None:
    """Whatever kernel an optimizer has on the device, it trains shards as it trains the plain model."""
    twin, ours = net().to(DEVICE), net()
    for model in (twin, ours):
        for each in model.parameters():
            each.requires_grad_(name != "Muon" or each.dim() == 2)
    plain(twin, OPTIMIZERS[name]([p for p in twin.parameters() if p.requires_grad]), rows())
    run = accelerator(version)
    optimizer = OPTIMIZERS[name]([p for p in ours.parameters() if p.requires_grad])
    row = row_of(type(optimizer))
    strategy: Any = run._runtime.strategy
    if row is not None and set(row[1].forms) & set(strategy.forms):
        with pytest.raises(PreparationError, match=f"got {row[0]}"):
            run.prepare(ours, optimizer)
        return
    model, optimizer = run.prepare(ours, optimizer)
    train(run, model, optimizer, rows())
    close(state(run, model), twin, 1e-5)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao_steps_as_on_the_plain_model(name: str) -> None:
    """Compiled, optimizers of torchao keep state of shards in few bits, and step alike where they step at all."""
    torch.compiler.reset()  # or what was compiled for another optimizer's state would be taken
    kind = getattr(pytest.importorskip("torchao.optim"), name)
    run, twin, hand, ours = accelerator(), net().to(DEVICE), net().to(DEVICE), net()
    plain(twin, kind(twin.parameters(), lr=0.01), rows(2))
    for block in (*hand.blocks, hand):
        fully_shard(block, mesh=init_device_mesh(DEVICE.type, (1,)))
    try:
        plain(hand, kind(hand.parameters(), lr=0.01), rows(2))
    except Exception as error:
        pytest.skip(f"with fully_shard by hand it fails too: {type(error).__name__}: {error}")
    model, optimizer = run.prepare(ours, kind(ours.parameters(), lr=0.01))
    train(run, model, optimizer, rows(2))
    close(state(run, model), twin, 1e-5)
    states = [entry for entries in optimizer.state.values() for entry in entries.values()]
    assert any(type(local_part(entry)) is not Tensor for entry in states if isinstance(entry, Tensor))


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
def test_bitsandbytes_is_refused_or_steps_alike(name: str) -> None:
    """Its kernels take no distributed tensors, and FSDP2 refuses them; FSDP1 of one rank trains with them."""
    library: Any = pytest.importorskip("bitsandbytes")
    kind = getattr(library.optim, name)
    ours = net()
    with pytest.raises(PreparationError, match="kernels that do not take distributed tensors"):
        accelerator().prepare(ours, kind(ours.parameters(), lr=0.01))
    reset_all()
    world.destroy()
    twin = net().to(DEVICE)
    plain(twin, kind(twin.parameters(), lr=0.01), rows())
    run = accelerator(1)
    model = run.prepare(ours)
    optimizer = run.prepare(kind(model.parameters(), lr=0.01))
    train(run, model, optimizer, rows())
    close(state(run, model), twin, 1e-5)


SAVED = [
    (version, way, kind)
    for version, way in ((1, "blocks"), (2, "blocks"), (2, "offloaded"))
    for kind in ("FULL", "SHARDED")
]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(("version", "way", "kind"), SAVED)
def test_a_run_goes_on_where_it_was_saved(tmp_path: Path, version: int, way: str, kind: str, blocking: bool) -> None:
    """Another run has the saved weights, moments and random numbers, also where training went on meanwhile."""

    def made(seed: int) -> tuple[Accelerator, Any, Any]:
        run, ours = accelerator(version, way, f"{kind}_STATE_DICT"), net(seed)
        return (run, *run.prepare(ours, adam(ours)))

    run, model, optimizer = made(0)
    train(run, model, optimizer, rows(2))
    saved, folder = state(run, model), str(tmp_path / "state")
    handle = run.save_state(folder, blocking=blocking)
    drawn = torch.rand(8, device=DEVICE)
    train(run, model, optimizer, rows(3))
    if not blocking:
        handle.wait()
    after = state(run, model)
    reset_all()
    run, model, optimizer = made(1)
    run.load_state(folder)
    assert torch.equal(torch.rand(8, device=DEVICE), drawn)
    torch.testing.assert_close(state(run, model), saved, rtol=0, atol=0)
    train(run, model, optimizer, rows(3))
    torch.testing.assert_close(state(run, model), after, rtol=0, atol=0)


@pytest.mark.parametrize(("version", "way"), [(2, "blocks"), (2, "offloaded"), (1, "blocks")])
def test_a_saved_model_is_the_plain_one(tmp_path: Path, version: int, way: str) -> None:
    """`save_model` writes what the plain model has after the same step, and it loads into one."""
    run = accelerator(version, way)
    twin, ours, again = net().to(DEVICE), net(), net(1)
    plain(twin, adam(twin), rows(1))
    model, optimizer = run.prepare(ours, adam(ours))
    train(run, model, optimizer, rows(1))
    run.save_model(model, tmp_path)
    load_model(again, tmp_path)
    close(dict(again.state_dict()), twin, 1e-5)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(("version", "way"), [(2, "blocks"), (2, "offloaded"), (1, "blocks")])
def test_averages_are_those_of_torch(version: int, way: str, device: str | None) -> None:
    """On the device or on the CPU, the average is torch's; the model computes with it, and gets its weights back."""
    run = accelerator(version, way)
    twin, ours = net().to(DEVICE), net()
    averaged = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    averaged.update_parameters(twin)
    plainly = adam(twin)
    model, optimizer = run.prepare(ours, adam(ours))
    ema = run.ema(model, 0.75, device=device)
    for batch in rows():
        plain(twin, plainly, batch[None])
        averaged.update_parameters(twin)
        train(run, model, optimizer, batch[None])
    x = rows(1)[0]
    with ema.applied(), torch.no_grad():
        close(state(run, model), averaged.module, 1e-5)
        torch.testing.assert_close(model(x), averaged(x), rtol=0, atol=1e-4)
    close(state(run, model), twin, 1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ["none", "blocks", "offloaded"])
def test_first_values_are_those_of_the_device_alone(way: str) -> None:
    """A model made without memory gets, shard or not, what the device draws for its names; no generator moves."""
    with empty.empty_init(3):
        alone = Net(**SIZES)
    empty.initialize(alone, DEVICE)
    run = Accelerator() if way == "none" else accelerator(2, way)
    device_module = torch.get_device_module(DEVICE)
    torch.manual_seed(11)
    before = torch.get_rng_state(), device_module.get_rng_state()
    with run.empty_init(3):
        made = Net(**SIZES)
    model, optimizer = run.prepare(made, adam(made))
    after = torch.get_rng_state(), device_module.get_rng_state()
    assert all(map(torch.equal, before, after))
    close(state(run, model), alone, 0)
    plain(alone, adam(alone), rows(1))
    train(run, model, optimizer, rows(1))
    close(state(run, model), alone, 1e-5)


def test_values_made_on_the_cpu_leave_the_device_alone() -> None:
    """On a machine with a device, a model that is made on the CPU moves no generator either."""
    torch.manual_seed(11)
    before = torch.get_device_module(DEVICE).get_rng_state()
    run = Accelerator(cpu=True)
    with run.empty_init(3):
        made = Net(**SIZES)
    run.prepare(made)
    assert torch.equal(torch.get_device_module(DEVICE).get_rng_state(), before)
