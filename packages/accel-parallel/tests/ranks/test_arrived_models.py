"""Models that arrive sharded, prepared without a plugin: trained as by one process, saved, and read on other meshes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import advance, assert_trained, refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accel_core.accelerator import Accelerator
from accel_core.errors import AccelError, ConfigurationError, PreparationError, RankDisagreementError
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires, world

pytestmark = requires("torch:2.8")  # the first that computes in shards on a CPU

_ROWS, _BATCH, _WINDOW = 48, 8, 2


class Net(nn.Module):
    """Blocks of two products, a head, and a scale of which every rank keeps all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.full((), 1.5 + seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return three numbers for four."""
        for block in self.blocks:
            x = x + block(x)
        y: torch.Tensor = self.head(x) * self.scale
        return y


def _rows() -> torch.Tensor:
    return torch.linspace(-2, 2, _ROWS * 4).sin().reshape(_ROWS, 4)


def _loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (net(x) - x[:, :3].cos()).square().mean()
    return found


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def _plainly(limit: float = 0.3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the norms of windows, and the weights after them, of one process."""
    net = Net()
    optimizer, norms = _optimizer(net), []
    for place, batch in enumerate(_rows().split(_BATCH), 1):
        (_loss(net, batch) / _WINDOW).backward()
        if place % _WINDOW == 0:
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), limit)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, dict(net.state_dict())


def _sharded(net: Net, mesh: DeviceMesh) -> Net:
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh, ignored_params={net.scale})
    for module in net.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return net


def _split(net: Net, mesh: DeviceMesh) -> Net:
    for block in net.blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net


def _arrived(kind: str, seed: int = 0) -> Net:
    """Return a model as somebody sharded it, with a scale that differs by rank until it is prepared."""
    here, net = ensure(), Net(seed)
    net.scale.data += here.rank
    if kind == "fsdp":
        return _sharded(net, init_device_mesh("cpu", (here.size,), mesh_dim_names=("fsdp",)))
    if kind == "hsdp":
        return _sharded(net, init_device_mesh("cpu", (2, here.size // 2), mesh_dim_names=("copies", "fsdp")))
    mesh = init_device_mesh("cpu", (here.size // 2, 2), mesh_dim_names=("fsdp", "tp"))
    net = _split(net, mesh["tp"])
    if kind == "tp":
        net.scale.data -= here.rank  # nothing is whole there that is not split too: its plan says so
        return net
    return _sharded(net, mesh["fsdp"])


def _trains(kind: str, replicas: int, before: Path | None, after: Path) -> None:
    """Train two windows, save, and train one after reading that again; or go on from what another kind saved."""
    norms, expected = _plainly()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=_WINDOW)
    net: Any = _arrived(kind)
    given = {name: id(each) for name, each in net.named_parameters()}
    data = torch.utils.data.DataLoader(_rows(), batch_size=_BATCH // replicas)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(net, _optimizer(net), data)
    assert model is net
    assert given == {name: id(each) for name, each in net.named_parameters()}
    assert accelerator.distributed_type.value == "MULTI_CPU"
    found = _windows(accelerator, model, optimizer, loader)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=1e-6)
    assert_trained(accelerator, model, expected, 2e-6)
    accelerator.save_state(after)
    accelerator.save_model(model, after / "whole")
    if before is not None:
        for parameter in model.parameters():
            parameter.data.zero_()
        accelerator.load_state(before)
        assert_trained(accelerator, model, expected, 2e-6)
    reset_all()


def _windows(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[float]:
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            norms.append(advance(_loss(model, batch), optimizer, run=accelerator, model=model, clip=0.3))
    return [norm for norm in norms if norm is not None]


@world(4)
def test_four_ranks_train_what_arrives_as_one_process(tmp_path: Path) -> None:
    """Shards, copies of them, shards of split layers, copies of split ones; each reads what the one before saved."""
    before = None
    for kind, replicas in (("fsdp", 4), ("hsdp", 4), ("fsdp x tp", 2), ("tp", 2)):
        _trains(kind, replicas, before, tmp_path / kind)
        before = tmp_path / kind


_MISFITS: dict[str, tuple[type[AccelError], str, dict[str, Any], str]] = {
    "axes": (ConfigurationError, "got FSDPNet with .*dp_shard_size=2.* run with .*tp_size=2", {"tp": 2}, "fsdp"),
    "a plugin that recomputes": (
        ConfigurationError,
        "activation_checkpointing=True",
        {"activation_checkpointing": True},
        "fsdp",
    ),
    "another version": (ConfigurationError, "got FSDPNet and the engine 'fsdp1'", {"fsdp_version": 1}, "fsdp"),
    "other ranks": (PreparationError, r"on a mesh of shape \(2,\) with the ranks \[1, 0\]", {}, "reversed"),
    "what nobody reduces": (PreparationError, r"got blocks\.0\.0\.weight, which trains and is in no", {}, "a part"),
}


@world(2)
def test_settings_that_do_not_fit_a_presharded_model_are_refused() -> None:
    """Axes, plugins and engines that disagree, meshes of other ranks, and models that come late, with all as it was."""
    ensure(cpu=True)
    both = init_device_mesh("cpu", (2,))
    made: dict[str, Callable[[], Net]] = {
        "fsdp": lambda: _sharded(Net(), both),
        "reversed": lambda: _sharded(Net(), DeviceMesh("cpu", [1, 0])),
        "a part": lambda: _split(Net(), both),
    }
    for name, (error, words, given, how) in _MISFITS.items():
        arguments: dict[str, Any] = {}
        if "tp" in given:
            arguments["parallelism_config"] = ParallelismConfig(tp_size=2)
        elif given:
            arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(**{"fsdp_version": 2} | given)
        accelerator = Accelerator(cpu=True, **arguments)
        net, strategy = made[how](), accelerator._runtime.strategy
        if how == "a part":
            fully_shard(net.head, mesh=both)
        with refused(error, words, accelerator, net):
            accelerator.prepare(net, _optimizer(net))
        assert accelerator._runtime.strategy is strategy, name
        reset_all()
    accelerator, early, net = Accelerator(cpu=True), Net(), made["fsdp"]()
    accelerator.prepare(early, _optimizer(early))
    with pytest.raises(PreparationError, match="got one after an optimizer and a model that trains"):
        accelerator.prepare(net, _optimizer(net))


@world(2)
def test_ranks_that_bring_different_models_are_told_so() -> None:
    """A model that arrives sharded on one rank alone ends on both by name, before either makes groups for it."""
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    net: nn.Module = _sharded(Net(), mesh) if accelerator.is_main_process else Net()
    with refused(RankDisagreementError, r"rank 0: prepare: a model that arrives sharded", accelerator, net):
        accelerator.prepare(net)


@world(2)
def test_what_arrives_computes_in_the_precision_of_the_run() -> None:
    """In bf16 a loss is that of autocast on one process, and parameters keep the format in which they came."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net, plain, batch = Net(), Net(), _rows()[:_BATCH]
    net = accelerator.prepare(_sharded(net, init_device_mesh("cpu", (2,))))
    loss = _loss(net, batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(batch)
    assert expected.dtype is torch.bfloat16
    torch.testing.assert_close(loss, (expected.float() - batch[:, :3].cos()).square().mean())
    accelerator.backward(loss)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert all(parameter.grad is not None for parameter in net.parameters())


@world(2, preload=("transformers.modeling_utils",))
def test_models_that_transformers_shards_train_as_in_one_process(tmp_path: Path) -> None:
    """Shards, split layers, and experts spread over ranks, read from a folder by each rank for itself; and back."""
    library = pytest.importorskip("transformers")
    distributed = pytest.importorskip("transformers.distributed")
    config = getattr(distributed, "DistributedConfig", None)
    if config is None or "ep_size" not in getattr(config, "__dataclass_fields__", {}):
        pytest.skip(f"needs transformers 5.23, which spreads experts while it loads; this is {library.__version__}")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ensure(cpu=True)
    dense = library.Qwen3ForCausalLM, library.Qwen3Config(**sizes, **heads)
    sparse = library.Qwen3MoeForCausalLM, library.Qwen3MoeConfig(**sizes, **heads, **experts)
    cases = {
        "fsdp": (dense, {"fsdp_size": 2}, 2),
        "tp": (dense, {"tp_size": 2}, 1),
        "ep": (sparse, {"fsdp_size": 2, "ep_size": 2}, 2),
    }
    words = torch.arange(32 * 8).reshape(32, 8) * 7 % 31
    for name, ((kind, settings), spread, replicas) in cases.items():
        torch.manual_seed(0)
        plain = kind(settings)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=_WINDOW)
        if accelerator.is_main_process:
            plain.save_pretrained(tmp_path / name)
        accelerator.wait_for_everyone()
        net = kind.from_pretrained(tmp_path / name, distributed_config=config(**spread))
        data = torch.utils.data.DataLoader(words, batch_size=8 // replicas)  # type: ignore[arg-type]
        net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5, foreach=True), data)
        whole = torch.optim.SGD(plain.parameters(), lr=0.5)
        for batch, everything in zip(loader, words.split(8), strict=True):
            expected = plain(input_ids=everything, labels=everything).loss
            (expected / _WINDOW).backward()
            with accelerator.accumulate(net):
                loss = net(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                mean = accelerator.reduce(loss.detach(), "mean")
                torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-6)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
                    whole_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                    torch.testing.assert_close(norm, whole_norm, rtol=1e-5, atol=1e-6)
                    whole.step()
                    whole.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
        assert_trained(accelerator, net, plain.state_dict(), 2e-6)
        accelerator.save_model(net, tmp_path / f"{name} whole")
        if accelerator.is_main_process:
            plain.config.save_pretrained(tmp_path / f"{name} whole")
        accelerator.wait_for_everyone()
        accelerator.save_state(tmp_path / f"{name} shards")
        back = kind.from_pretrained(tmp_path / f"{name} whole", distributed_config=config(**spread))
        for (own, one), other in zip(net.named_parameters(), back.parameters(), strict=True):
            assert isinstance(one, DTensor) == isinstance(other, DTensor), own
            assert torch.equal(*(each.to_local() if isinstance(each, DTensor) else each for each in (one, other))), own
        reset_all()
