"""Tests of packed weights that accel-bigmodel writes to disk through the registered format."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel import (
    OffloadedWeightsLoader,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_in_model,
)
from accel_core.errors import OffloadError
from accel_quant import BnbQuantizationConfig, load_and_quantize_model, replace_with_bnb_layers

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")

PLACES = {"0": "cpu", "2": "disk"}


def plain() -> nn.Sequential:
    """Make two layers."""
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24)).eval()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of `plain` in a file."""
    torch.manual_seed(0)
    save_file(plain().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def empty() -> nn.Module:
    """Make the layers without weights, to be packed to 8 bits."""
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32)
    with init_empty_weights():
        model = plain()
    return replace_with_bnb_layers(model, config).eval()


@torch.no_grad()
def test_weights_are_packed_before_they_are_written(weights: Path, tmp_path: Path) -> None:
    """With `offload_8bit_bnb` a layer on disk is stored in a folder as bitsandbytes packs it, and computes alike."""
    folder = tmp_path / "offload"
    model = empty()
    with pytest.raises(OffloadError, match=r"'2\.weight' first"):
        load_checkpoint_in_model(model, weights, PLACES, offload_8bit_bnb=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_checkpoint_in_model(model, weights, PLACES, offload_folder=folder, offload_8bit_bnb=True)
    stored = OffloadedWeightsLoader(save_folder=folder)
    assert set(stored) == {"2.weight", "2.SCB"}
    assert stored["2.weight"].dtype == torch.int8
    assert (folder / "2.weight.dat").stat().st_size == 24 * 48
    by_hand = plain()
    by_hand.load_state_dict(load_file(weights))
    for number in (0, 2):
        layer = by_hand[number]
        made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False, threshold=6.0)
        made.load_state_dict(layer.state_dict())
        by_hand[number] = made.to("cpu").eval()
    assert torch.equal(model[0].weight.data, by_hand[0].weight.data)
    assert torch.equal(stored["2.weight"], by_hand[2].weight.data)
    assert torch.equal(stored["2.SCB"], by_hand[2].weight.SCB)
    model = dispatch_model(model, PLACES, offload_dir=folder)
    assert model[2].weight.is_meta
    x = torch.randn(5, 32)
    for _ in range(2):
        assert torch.equal(model(x), by_hand(x))
        assert model[2].weight.is_meta


def packed(factor: float, **places: object) -> nn.Module:
    """Make the layers with weights so many times as large, packed to 8 bits."""
    torch.manual_seed(0)
    model = plain()
    with torch.no_grad():
        model[0].weight *= factor
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=[], torch_dtype=torch.float32)
    return load_and_quantize_model(model, config, **places)  # type: ignore[arg-type]


def test_a_folder_of_other_scales_is_refused(tmp_path: Path) -> None:
    """Weights twice as large have the same codes, and are other weights."""
    first, second = (packed(factor, device_map={"": "cpu"}) for factor in (1, 2))
    assert torch.equal(first[0].weight.data, second[0].weight.data)  # type: ignore[index]
    disk_offload(first, tmp_path, torch.device("cpu"))
    with pytest.raises(OffloadError, match=r"holds other weights than the model; got .*'0\.SCB' differs"):
        disk_offload(second, tmp_path, torch.device("cpu"))


@torch.no_grad()
def test_models_packed_into_one_folder_keep_their_weights(tmp_path: Path) -> None:
    """What the second one writes there is not what the first one computes with."""
    x = torch.randn(5, 32)
    models = [packed(factor, device_map={"": "disk"}, offload_folder=tmp_path) for factor in (1, 2)]
    for factor, model in zip((1, 2), models, strict=True):
        assert torch.equal(model(x), packed(factor, device_map={"": "cpu"})(x))
