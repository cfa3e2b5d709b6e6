"""Each field of the FSDP plugin has its effect on what is trained, in both versions."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from several_ranks import LAYERS, WHOLE, advance, blocks
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accel_core.accelerator import Accelerator
from accel_core.plugins.fp8 import AORecipeKwargs
from accel_core.state import reset_all
from accel_parallel.fsdp2 import in_place
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world

FIRST = {"fsdp_version": 1, "use_orig_params": True, "state_dict_type": "FULL_STATE_DICT"}
SECOND = {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}


class Block(nn.Module):
    """A layer of 20 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers for numbers."""
        y: torch.Tensor = self.layer(x).tanh()
        return y


class Net(nn.Module):
    """Two blocks, which no list holds, a head of 10 elements, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = Block(), Block(), nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers for four."""
        y: torch.Tensor = self.head(self.two(self.one(x))) + self.shift
        return y


def _prepared(settings: dict[str, Any], **given: Any) -> tuple[Accelerator, Any]:
    """Return a fresh run with a plugin, and the model that it prepared."""
    reset_all()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**settings | given))
    return accelerator, accelerator.prepare(Net())


def _units(net: nn.Module) -> list[str]:
    """Return the names of the parts that are sharded one by one."""
    names = (name for name, part in net.named_modules() if isinstance(part, FSDPModule | FullyShardedDataParallel))
    return [name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "") for name in names]


def _only_head(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or (isinstance(module, nn.Linear) and module.out_features == 2)


WRAPPING = [
    ({"auto_wrap_policy": "no_wrap"}, []),
    (blocks("Block"), ["one", "two"]),
    ({"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block,Linear"}, None),
    ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 15}, ["one.layer", "two.layer"]),
    ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}, ["one.layer", "two.layer", "head"]),
    ({"auto_wrap_policy": _only_head}, ["head"]),
]


@pytest.mark.parametrize("settings", [FIRST, SECOND], ids=["version 1", "version 2"])
@world(2)
def test_wrapping(settings: dict[str, Any]) -> None:
    """auto_wrap_policy, transformer_cls_names_to_wrap and min_num_params decide what is sharded one by one."""
    for given, expected in WRAPPING:
        found = _units(_prepared(settings, **given)[1])
        wanted = ["one", "one.layer", "two", "two.layer", "head"] if expected is None else expected
        assert found == ["", *wanted], given


@pytest.mark.parametrize("settings", [FIRST, SECOND], ids=["version 1", "version 2"])
@world(2)
def test_fields_of_both_versions(settings: dict[str, Any]) -> None:
    """fsdp_version, ignored_modules, number formats and the settings of state dicts."""
    accelerator, net = _prepared(settings)
    assert isinstance(net, FullyShardedDataParallel if settings["fsdp_version"] == 1 else FSDPModule)
    assert bool(accelerator.get_state_dict(net)) == accelerator.is_main_process
    accelerator, net = _prepared(settings, **WHOLE)
    assert list(accelerator.get_state_dict(net)) == list(Net().state_dict())
    for by_name in (True, False):
        reset_all()
        model = Net()
        plugin = FullyShardedDataParallelPlugin(**settings, ignored_modules="head" if by_name else [model.head])
        accelerator = Accelerator(fsdp_plugin=plugin)
        weight = accelerator.unwrap_model(accelerator.prepare(model)).head.weight
        assert (type(weight), weight.shape) == (nn.Parameter, (2, 4))
    kind = fsdp.MixedPrecision if settings["fsdp_version"] == 1 else fsdp.MixedPrecisionPolicy
    policy = kind(param_dtype=torch.bfloat16)
    for given in ("bf16", {"param_dtype": "bf16"}, policy):
        accelerator, net = _prepared(settings, mixed_precision_policy=given)
        seen: list[torch.dtype] = []
        inner = accelerator.unwrap_model(net)
        inner.head.register_forward_hook(lambda part, args, out, seen=seen: seen.append(part.weight.dtype))
        net(torch.ones(1, 4))
        assert seen == [torch.bfloat16]
        assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert _prepared(settings)[1](torch.ones(1, 4)).dtype is torch.float32


@world(2)
def test_fields_of_version_1() -> None:
    """What torch's wrapper is given arrives there: strategy, prefetching, limits and what parameters look like."""
    for kind in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        net = _prepared(FIRST, sharding_strategy=kind)[1]
        held = sum(p.numel() for p in net.parameters())
        assert net.sharding_strategy is fsdp.ShardingStrategy[kind]
        assert (held == 50) == (kind == "NO_SHARD")
    net = _prepared(FIRST, reshard_after_forward="SHARD_GRAD_OP")[1]
    assert net.sharding_strategy is fsdp.ShardingStrategy.SHARD_GRAD_OP
    net = _prepared(FIRST, backward_prefetch="BACKWARD_POST", forward_prefetch=True, limit_all_gathers=False)[1]
    assert net.backward_prefetch is fsdp.BackwardPrefetch.BACKWARD_POST
    assert (net.forward_prefetch, net.limit_all_gathers) == (True, False)
    net = _prepared(FIRST)[1]
    assert (net.backward_prefetch, net.forward_prefetch, net.limit_all_gathers) == (None, False, True)
    assert len(list(net.parameters())) == 6
    assert len(list(_prepared(FIRST, use_orig_params=False)[1].parameters())) == 6
    offloaded = _prepared(FIRST, cpu_offload=True)[1]
    assert {p.device.type for p in offloaded.parameters()} == {"cpu"}


@world(2)
def test_weights_of_the_first_rank_in_version_1() -> None:
    """param_init_fn makes what is on the meta device, and sync_module_states fills it from rank 0."""
    made: list[str] = []

    def make(module: nn.Module) -> None:
        made.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)

    reset_all()
    plugin = FullyShardedDataParallelPlugin(**FIRST, param_init_fn=make, sync_module_states=True)  # type: ignore[arg-type]
    accelerator = Accelerator(fsdp_plugin=plugin)
    net = Net() if accelerator.is_main_process else Net().to("meta")
    net = accelerator.prepare(net)
    state = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.testing.assert_close(state, dict(Net().state_dict()), rtol=0, atol=0)


@world(2)
def test_fields_of_version_2() -> None:
    """reshard_after_forward frees gathered weights or keeps them, and offloading is given to torch without pinning."""
    layers = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}
    for freed in (True, False):
        accelerator, net = _prepared(SECOND, reshard_after_forward=freed, **layers)
        net(torch.ones(1, 4))
        assert isinstance(net.one.layer.weight, DTensor) == freed
    with patch.object(in_place, "fully_shard", wraps=in_place.fully_shard) as given_to_torch:
        _prepared(SECOND, cpu_offload=True, **layers)
        _prepared(SECOND, **layers)
    seen = [call.kwargs for call in given_to_torch.call_args_list]
    offloads = [type(each["offload_policy"]) for each in seen]
    assert offloads == [fsdp.CPUOffloadPolicy] * 4 + [fsdp.OffloadPolicy] * 4
    assert seen[0]["offload_policy"].pin_memory is False
    assert accelerator.num_processes == 2


@pytest.mark.parametrize("settings", [FIRST, SECOND], ids=["version 1", "version 2"])
@world(2)
def test_activation_checkpointing_runs_blocks_twice(settings: dict[str, Any]) -> None:
    """With activation_checkpointing a block computes in both passes, without it in one; offloading keeps the count."""
    choices: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}]
    if settings["fsdp_version"] == 2:
        choices.append({"activation_checkpointing": True, "activation_checkpointing_offload": True})
    for given in choices:
        accelerator, net = _prepared(settings, **blocks("Block"), **given)
        ran: list[int] = []
        accelerator.unwrap_model(net).one.layer.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        accelerator.backward(net(torch.ones(1, 4)).sum())
        assert len(ran) == (2 if given else 1)


@pytest.mark.parametrize(
    ("version", "gathered"),
    [pytest.param(1, False, marks=pytest.mark.full("another case of a grid")), (1, True), (2, False), (2, True)],
)
@world(2)
def test_layers_of_torchao_train_in_shards(version: int, gathered: bool) -> None:
    """In fp8, losses and weights are those of whole copies on as many ranks, also where torchao gathers 8 bits."""
    float8 = pytest.importorskip("torchao.float8", reason="needs the library torchao, not installed here")
    if version == 1 and gathered:
        pytest.skip("torchao gathers 8 bits for version 2 alone")
    layers = WHOLE | LAYERS | {"min_num_params": 100} | ({"use_orig_params": True} if version == 1 else {})
    found: list[dict[str, Any]] = []
    for sharded in (False, True):
        reset_all()
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gathered and sharded)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **layers) if sharded else None
        recipe = [AORecipeKwargs(config=config)]
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=recipe)
        torch.manual_seed(0)
        net: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        losses = []
        for step in range(3):
            torch.manual_seed(10 * step + accelerator.process_index)
            advance(loss := net(torch.randn(16, 32)).float().square().mean(), optimizer, run=accelerator)
            losses.append(loss.detach())
        inner = accelerator.unwrap_model(net)
        assert sum(type(part).__name__.endswith("Float8Linear") for part in inner.modules()) == 2
        found.append({**accelerator.get_state_dict(net), "losses": torch.stack(losses)})
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-4)
