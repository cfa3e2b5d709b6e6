"""Compiled models are loaded, placed and offloaded like any other, under names with and without `_orig_mod`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    align_module_device,
    cpu_offload,
    disk_offload,
    dispatch_model,
    has_offloaded_params,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
)
from accel_core.errors import DeviceMapError

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4)


@pytest.fixture(autouse=True)
def eagerly() -> Iterator[None]:
    """Trace no graphs, which takes seconds: these tests are about names; those of the modes compile."""
    with torch.compiler.set_stance("force_eager"):
        yield
    torch._dynamo.reset()


def make(seed: int) -> nn.Sequential:
    """Make a layer and two more in a block."""
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), block).eval().requires_grad_(False)


def compiled(model: nn.Sequential, what: str) -> nn.Module:
    """Compile nothing, the whole model, or its block alone."""
    if what == "whole":
        return cast(nn.Module, torch.compile(model, backend="eager"))
    if what == "block":
        model[1] = cast(nn.Module, torch.compile(model[1], backend="eager"))
    return model


KINDS = ("plain", "whole", "block")


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", ["whole", "block"])
def test_a_compiled_model_is_loaded(source: str, target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever of both is compiled, every weight is loaded, and no name is missing or left over."""
    save_file(compiled(make(1), source).state_dict(), tmp_path / "model.safetensors")
    model = compiled(make(2), target)
    assert load_checkpoint_in_model(model, tmp_path, strict=True) == ([], [])
    assert torch.equal(model(X), make(1)(X))
    assert "not used" not in caplog.text


MAPS = {
    "plain names": {"0": "cpu", "1.0": "disk", "1.1": "cpu", "1.2": "cpu"},
    "names of a whole model": {"_orig_mod.0": "cpu", "_orig_mod.1": "disk"},
    "names of a block": {"0": "disk", "1._orig_mod": "cpu"},
    "the model": {"": "disk"},
    "the model inside": {"_orig_mod": "disk"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", MAPS)
def test_a_map_means_a_compiled_model_too(kind: str, names: str, tmp_path: Path) -> None:
    """Loaded or dispatched by either kind of names, it computes what it does in memory, its weights on disk."""
    save_file(make(1).state_dict(), tmp_path / "model.safetensors")
    loaded = load_checkpoint_and_dispatch(compiled(make(2), kind), tmp_path, device_map=MAPS[names])
    placed = dispatch_model(compiled(make(1), kind), MAPS[names], offload_dir=tmp_path / "folder")
    for model in (loaded, placed):
        for _ in range(2):
            assert torch.equal(model(X), make(1)(X))
        assert any(parameter.is_meta for parameter in model.parameters())
        assert model.hf_device_map == MAPS[names]
        inner = model._orig_mod if kind == "whole" else model
        assert inner.hf_device_map == MAPS[names]
        remove_hook_from_submodules(model)
    assert torch.equal(placed(X), make(1)(X))


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_that_was_inferred_fits(kind: str, tmp_path: Path) -> None:
    """The map of a compiled model places all of it, and one that misses a weight is refused."""
    model = compiled(make(1), kind)
    places = infer_auto_device_map(model, {"cpu": 200})
    assert set(places.values()) == {"cpu", "disk"}
    assert torch.equal(dispatch_model(model, places, offload_dir=tmp_path)(X), make(1)(X))
    with pytest.raises(DeviceMapError, match="bias"):
        dispatch_model(compiled(make(1), kind), {"0": "cpu", "1.0": "cpu"})


@pytest.mark.parametrize("kind", ["whole", "block"])
@pytest.mark.parametrize("given", [False, True])
def test_a_compiled_model_is_offloaded(kind: str, given: bool, tmp_path: Path) -> None:
    """On the CPU and on disk, with weights of its own or given by plain names, it computes the same."""
    on_cpu = cpu_offload(
        compiled(make(2 if given else 1), kind), CPU, state_dict=make(1).state_dict() if given else None
    )
    on_disk = disk_offload(compiled(make(1), kind), tmp_path, CPU)
    for model in (on_cpu, on_disk):
        for _ in range(2):
            assert torch.equal(model(X), make(1)(X))
        assert all(parameter.is_meta for parameter in model.parameters())


def test_the_weights_of_a_compiled_layer_are_brought_for_a_while() -> None:
    """`align_module_device` and `has_offloaded_params` look at the layer that was compiled."""
    layer: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    weight = layer.weight.detach().clone()
    cpu_offload(layer, CPU)
    assert has_offloaded_params(layer)
    with align_module_device(layer):
        assert torch.equal(layer.weight, weight)
    assert layer.weight.is_meta
