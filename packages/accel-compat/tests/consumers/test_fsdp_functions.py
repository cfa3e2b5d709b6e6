"""The functions of `accelerate.utils.fsdp_utils`, called as trainers call them: with little more than a plugin."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from accel_core.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    EngineUnavailableError,
    PreparationError,
)
from accel_core.process.world import GroupNeeds, ensure
from accel_testing import requires, world
from accel_testing.world import run
from accelerate.utils import FullyShardedDataParallelPlugin, compile_regions_fsdp2, fsdp_utils

VERSION_2 = pytest.param(2, marks=requires("torch:2.8"))
"""Version 2 of FSDP trains on CPUs from that torch on."""


class Block(nn.Module):
    """A layer that repeats, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer."""
        return self.drop(torch.tanh(self.line(x)))


class Model(nn.Module):
    """Two blocks between an embedding and a head that share their weight, and buffers of both kinds."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute scores of words."""
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


def light(mesh: Any = None, mixed_precision: str = "no", **given: Any) -> Any:
    """Return the few attributes of an accelerator that the functions read."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **({"auto_wrap_policy": "transformer_based_wrap"} | given))
    return SimpleNamespace(
        mixed_precision=mixed_precision,
        torch_device_mesh=mesh,
        device=torch.device("cpu"),
        state=SimpleNamespace(fsdp_plugin=plugin),
    )


def model(seed: int = 0) -> Model:
    """Return a model with weights of its own."""
    torch.manual_seed(seed)
    return Model()


def whole(sharded: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a sharded model, whole on every rank."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in sharded.state_dict().items()}


@requires("torch:2.8")
@world(2)
def test_a_model_prepared_by_hand_trains_like_one_process() -> None:
    """Blocks are sharded in place, with activations recomputed and dropout alike, over any mesh of data axes."""
    ensure()
    plain = model()
    for mesh in (None, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))):
        accelerator = light(mesh, activation_checkpointing=True)
        given = fsdp_utils.fsdp2_apply_ac(accelerator, copy.deepcopy(plain))
        prepared = fsdp_utils.fsdp2_prepare_model(accelerator, given)
        assert prepared is given
        assert isinstance(given.layers[1], FSDPModule)
        assert fsdp_utils.fsdp2_prepare_model(accelerator, prepared) is prepared
        words = torch.tensor([[0, 1, 2]])
        for one in (plain, prepared):
            one.zero_grad()
            torch.manual_seed(3)
            one(words).square().sum().backward()
        for (name, expected), parameter in zip(plain.named_parameters(), prepared.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, msg=name)  # type: ignore[union-attr]


@requires("torch:2.8")
@world(2)
def test_half_masters_and_ignored_modules_of_a_prepared_model() -> None:
    """What trains gets 32 bits under mixed precision, what is frozen keeps its own; ignored modules stay whole."""
    half = model().bfloat16()
    half.layers[0].requires_grad_(False)
    prepared = fsdp_utils.fsdp2_prepare_model(light(mixed_precision="bf16", ignored_modules="layers.1"), half)
    assert {str(p.dtype) for p in prepared.layers[0].parameters()} == {"torch.bfloat16"}
    assert {str(p.dtype) for p in prepared.layers[1].parameters()} == {"torch.float32"}
    assert not any(isinstance(p, DTensor) for p in prepared.layers[1].parameters())


@requires("torch:2.8")
@world(2)
def test_only_the_first_rank_needs_weights() -> None:
    """With RAM-efficient loading every rank trains what rank 0 has, buffers too; meta weights need no asking."""
    rank = ensure().rank
    first = model(0)
    asked = fsdp_utils.fsdp2_prepare_model(light(cpu_ram_efficient_loading=True), model(rank))
    with torch.device("meta" if rank else "cpu"):
        empty = model(0)
    seen = fsdp_utils.fsdp2_prepare_model(light(), empty)
    for prepared in (asked, seen):
        torch.testing.assert_close(whole(prepared), dict(first.state_dict()))
        assert torch.equal(prepared.passing, first.passing)
        assert prepared.head.weight is prepared.words.weight


@requires("torch:2.8")
@pytest.mark.slow
@world(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_full_state_reaches_the_shards(device: str) -> None:
    """Values of rank 0 reach every shard in the model's own dtype; ties hold, and parameters with memory stay."""
    here = ensure()
    with torch.device(device):
        sharded = Model()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    before = sharded.words.weight
    given = {name: tensor.double() for name, tensor in model(7).state_dict().items()}
    fsdp_utils.fsdp2_load_full_state_dict(light(), sharded, given if here.is_main else {})
    torch.testing.assert_close(whole(sharded), dict(model(7).state_dict()))
    assert sharded.head.weight is sharded.words.weight
    assert (sharded.words.weight is before) == (device == "cpu")
    sharded(torch.tensor([[1]])).sum().backward()


@pytest.mark.slow
@world(2)
def test_a_full_state_that_does_not_fit_changes_nothing() -> None:
    """Missing, unknown and misshapen names are an error on both ranks at once."""
    here = ensure()
    sharded = model()
    fully_shard(sharded)
    given = dict(model(7).state_dict()) | {"other": torch.ones(1), "layers.0.line.bias": torch.ones(9)}
    del given["kept"]
    found = r"got no kept, the unknown other, layers\.0\.line\.bias of shape \(9,\) instead of \(4,\)"
    with pytest.raises(CheckpointMismatchError, match=found):
        fsdp_utils.fsdp2_load_full_state_dict(light(), sharded, given if here.is_main else {})
    torch.testing.assert_close(whole(sharded), dict(model().state_dict()))


@world(2)
def test_an_optimizer_follows_by_address_or_by_parameter() -> None:
    """Parameters and their state are exchanged in place; one that the mapping lacks is refused before any is."""
    ensure()
    for by_address in (True, False):
        plain = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        plain(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        momentum = {p.shape: optimizer.state[p]["momentum_buffer"].clone() for p in plain.parameters()}
        old = dict(plain.named_parameters())
        fully_shard(plain)
        mapping = {old[n].data_ptr() if by_address else old[n]: p for n, p in plain.named_parameters()}
        with pytest.raises(PreparationError, match=r"shape \(2,\) in group 0"):
            fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, dict(list(mapping.items())[:1]))
        assert optimizer.param_groups[0]["params"][0] is old["weight"]
        if by_address:
            for place, parameter in enumerate(optimizer.param_groups[0]["params"]):
                stand_in = torch.empty_like(parameter)
                stand_in.data_ptr = parameter.data_ptr()  # as callers do that free the weights before
                optimizer.state[stand_in] = optimizer.state.pop(parameter)
                optimizer.param_groups[0]["params"][place] = stand_in
        fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)
        for parameter in plain.parameters():
            assert any(parameter is held for held in optimizer.param_groups[0]["params"])
            torch.testing.assert_close(
                optimizer.state[parameter]["momentum_buffer"].full_tensor(), momentum[parameter.shape]
            )


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"auto_wrap_policy": "transformer_based_wrap"}, {"layers.0", "layers.1"}),
        ({"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Embedding"]}, {"words"}),
        ({"auto_wrap_policy": lambda module, **_: isinstance(module, nn.Dropout)}, {"layers.0.drop", "layers.1.drop"}),
        ({"auto_wrap_policy": "no_wrap"}, None),
    ],
)
def test_the_policy_chooses_modules(given: dict[str, Any], chosen: set[str] | None) -> None:
    """A policy's word or function becomes a function of the module; no policy is `None`."""
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(light(**given).state.fsdp_plugin, Model())
    assert (None if policy is None else {name for name, part in Model().named_modules() if policy(part)}) == chosen


def test_the_policy_by_size_counts_parameters() -> None:
    """Modules with as many parameters as the plugin says are sharded on their own, and smaller ones not."""
    plugin = light(auto_wrap_policy="size_based_wrap", min_num_params=20).state.fsdp_plugin
    policy: Any = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, Model())
    assert [policy(nn.Linear(4, 4)), policy(nn.Linear(4, 3))] == [True, False]


def test_a_class_that_is_not_there_is_refused() -> None:
    """The policy names the classes that the model has."""
    plugin = light(transformer_cls_names_to_wrap=["Nope"]).state.fsdp_plugin
    with pytest.raises(ConfigurationError, match=r"\['Nope'\]"):
        fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, Model())


def test_names_scaler_and_parameters() -> None:
    """Names lose the prefixes of wrappers, the scaler is torch's, and parameters come from modules or their names."""
    names = ["_orig_mod.a", "layers.0._checkpoint_wrapped_module._orig_mod.b", "module.c"]
    bare = fsdp_utils.fsdp2_canonicalize_names({name: place for place, name in enumerate(names)})
    assert bare == {"a": 0, "layers.0.b": 1, "module.c": 2}
    scaler = fsdp_utils.get_fsdp2_grad_scaler(device="cpu", init_scale=4.0)
    assert (type(scaler), scaler.get_scale()) == (torch.amp.GradScaler, 4.0)
    given, cpu = Model(), torch.device("cpu")
    assert fsdp_utils.get_parameters_from_modules([given.words], given, cpu) == {given.words.weight}
    assert fsdp_utils.get_parameters_from_modules(r"layers\.1", given, cpu) == set(given.layers[1].parameters())
    assert fsdp_utils.get_parameters_from_modules("layer", given, cpu) == set()
    assert fsdp_utils.get_parameters_from_modules(None, given, cpu) == set()


def test_an_initializer_keeps_ties() -> None:
    """Tied meta weights get one memory; a model without ties keeps its initializer."""

    def empty(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    with torch.device("meta"):
        tied, plain = Model(), nn.Linear(2, 2)
    initialize = fsdp_utils.ensure_weights_retied(empty, tied, torch.device("cpu"))
    for module in tied.modules():
        initialize(module)
    assert tied.head.weight is tied.words.weight
    assert not any(tensor.is_meta for tensor in tied.state_dict().values())
    assert fsdp_utils.ensure_weights_retied(empty, plain, torch.device("cpu")) is empty


def test_blocks_are_compiled_where_they_stand() -> None:
    """As in Accelerate, repeated blocks and what is beside them keep their classes and call what was compiled."""
    given = Model()
    kinds = [type(part) for part in given.modules()]
    assert compile_regions_fsdp2(given, backend="eager") is given
    assert [type(part) for part in given.modules()] == kinds
    compiled = [name for name, part in given.named_modules() if part._compiled_call_impl]
    assert compiled == ["words", "layers.0", "layers.1", "head"]
    alone = nn.Linear(2, 2)
    assert compile_regions_fsdp2(alone, backend="eager")._compiled_call_impl is not None


def trained(version: int, seed: int = 0, kind: str = "FULL_SHARD") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model that FSDP shards, or only wraps, and its optimizer after a step."""
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    sharded: nn.Module = plain
    if version == 2:
        fully_shard(plain)
    else:
        sharded = FullyShardedDataParallel(
            plain,
            device_mesh=init_device_mesh("cpu", (ensure().size,)),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy[kind],
        )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    sharded(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return sharded, optimizer


def values(sharded: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what this rank holds of a model and its optimizer."""
    state = {name: p.detach().clone() for name, p in sharded.named_parameters()}
    parts = {id(p): name for name, p in sharded.named_parameters()}
    entries = {
        f"{parts[id(p)]}.{key}": value.clone() for p, own in optimizer.state.items() for key, value in own.items()
    }
    found = state | entries
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}


@pytest.mark.slow
@world(2)
@pytest.mark.parametrize("version", [1, VERSION_2])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_model_and_its_optimizer_are_saved_and_loaded(tmp_path: Path, version: int, kind: str) -> None:
    """What Accelerate's names hold brings another model and optimizer to the same values; a misfit changes nothing."""
    ensure()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    model, optimizer = trained(version)
    for index in range(2):
        fsdp_utils.save_fsdp_model(plugin, None, model, tmp_path, index)
        fsdp_utils.save_fsdp_optimizer(plugin, None, optimizer, model, tmp_path, index)
    whole_files = ["optimizer.bin", "optimizer_1.bin", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"]
    folders = ["optimizer_0", "optimizer_1", "pytorch_model_fsdp_0", "pytorch_model_fsdp_1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == (whole_files if kind[0] == "F" else folders)
    other, its_optimizer = trained(version, 9)
    found = fsdp_utils.load_fsdp_model(plugin, None, other, tmp_path, 1)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    fsdp_utils.load_fsdp_optimizer(plugin, None, its_optimizer, other, tmp_path, 1)
    torch.testing.assert_close(values(other, its_optimizer), values(model, optimizer), rtol=0, atol=0)
    foreign = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(foreign)
    before = held(foreign)
    with pytest.raises(CheckpointMismatchError, match=r"has shape \(5, 3\) instead of \(4, 3\)"):
        fsdp_utils.load_fsdp_model(plugin, None, foreign, tmp_path)
    torch.testing.assert_close(held(foreign), before)
    with pytest.raises(CheckpointNotFoundError):
        fsdp_utils.load_fsdp_model(plugin, None, foreign, tmp_path, 7)
    if kind == "SHARDED_STATE_DICT":
        with pytest.raises(EngineUnavailableError, match=r"saved whole or in shards"):
            fsdp_utils.save_fsdp_model(plugin, None, model, tmp_path, use_dcp=False)


def goes_round(place: Path) -> None:
    """Save, load and take a step of what FSDP1 wraps without sharding it, in both layouts."""
    kind = "NO_SHARD" if ensure(needs=GroupNeeds(alone=True)).size > 1 else "FULL_SHARD"
    for layout in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type=layout)
        saved, other = trained(1, 0, kind), trained(1, 9, kind)
        fsdp_utils.save_fsdp_model(plugin, None, saved[0], place / layout)
        fsdp_utils.save_fsdp_optimizer(plugin, None, saved[1], saved[0], place / layout)
        fsdp_utils.load_fsdp_model(plugin, None, other[0], place / layout)
        fsdp_utils.load_fsdp_optimizer(plugin, None, other[1], other[0], place / layout)
        torch.testing.assert_close(values(*other), values(*saved), rtol=0, atol=0)
        for model, optimizer in (saved, other):
            optimizer.zero_grad()
            model(torch.full((1, 3), 2.0)).sum().backward()
            optimizer.step()
        torch.testing.assert_close(values(*other), values(*saved), rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_what_version_1_does_not_shard_is_saved_and_loaded(tmp_path: Path, size: int) -> None:
    """With NO_SHARD, or one process, another model and optimizer come to the same values and take the same step."""
    run(goes_round, size, (tmp_path,))


@world(2)
@pytest.mark.parametrize("version", [1, VERSION_2])
def test_an_optimizer_that_never_stepped_stays_so(tmp_path: Path, version: int) -> None:
    """Saving and loading make no state where there is none, and what is loaded into a used optimizer ends its state."""
    ensure()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    model, used = trained(version)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.3)
    fsdp_utils.save_fsdp_optimizer(plugin, None, fresh, model, tmp_path)
    assert not fresh.state
    fsdp_utils.load_fsdp_optimizer(plugin, None, used, model, tmp_path)
    assert not used.state
    assert used.param_groups[0]["lr"] == 0.3


def held(sharded: nn.Module) -> dict[str, Any]:
    """Return what this rank holds of a model that is sharded in place."""
    return {name: p.to_local().clone() for name, p in sharded.named_parameters()}  # type: ignore[attr-defined]


@requires("torch:2.8")
@world(2)
def test_only_the_form_that_is_asked_for_is_read(tmp_path: Path) -> None:
    """Other forms of a model in the folder are left alone; a failed save leaves the form that was there."""
    here = ensure()
    whole = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    shards = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    (first, _), (second, _), (other, _) = trained(2, 1), trained(2, 2), trained(2, 3)
    fsdp_utils.save_fsdp_model(whole, None, first, tmp_path)
    fsdp_utils.save_fsdp_model(shards, None, second, tmp_path)
    if here.is_main:
        (tmp_path / "model.safetensors").write_bytes(b"of another function")
    for plugin, saved in ((whole, first), (shards, second)):
        fsdp_utils.load_fsdp_model(plugin, None, other, tmp_path)
        torch.testing.assert_close(held(other), held(saved), rtol=0, atol=0)

    def fail(*_: object) -> None:
        raise OSError("no state today")

    if here.rank == 1:
        second.register_state_dict_post_hook(fail)
    with pytest.raises(CheckpointError, match=r"rank 1: OSError: no state today"):
        fsdp_utils.save_fsdp_model(shards, None, second, tmp_path)
    fsdp_utils.load_fsdp_model(shards, None, other, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "model.safetensors",
        "pytorch_model_fsdp.bin",
        "pytorch_model_fsdp_0",
    ]
