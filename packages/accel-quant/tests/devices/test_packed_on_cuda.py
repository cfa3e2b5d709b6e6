"""Packed models on a GPU, with bitsandbytes: loaded straight onto it, offloaded, saved and trained around."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_bigmodel import init_empty_weights
from accel_core.accelerator import Accelerator
from accel_quant import BnbQuantizationConfig, load_and_quantize_model

pytest.importorskip("bitsandbytes")
sys.path.insert(0, str(Path(__file__).parents[1]))
from packed_models import Model, by_hand

DEVICE = torch.device("cuda", 0)
HERE: Any = 0 if DEVICE.type == "cuda" else "cpu"
SIZES = WIDTH, INNER, _ = 256, 1024, 3
CONFIGS: dict[str, dict[str, Any]] = {
    "8bit": {"load_in_8bit": True},
    "8bit-no-threshold": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True},
    "fp4-double-bf16": {
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bf16",
        "torch_dtype": torch.bfloat16,
    },
}
SOME = ("8bit", "nf4-double")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state", "collected"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),  # it says that inputs are cast
    pytest.mark.filterwarnings("ignore:No accelerator has room for the buffers"),  # two bytes of them
]


@pytest.fixture
def collected() -> Iterator[None]:
    """End the threads of models that hold themselves in cycles."""
    yield
    gc.collect()


@pytest.fixture
def trained() -> Model:
    """A model with fixed weights, on the CPU."""
    torch.manual_seed(0)
    return Model(*SIZES).eval()


def config(name: str) -> BnbQuantizationConfig:
    """Return a way to pack."""
    return BnbQuantizationConfig(**CONFIGS[name])


def loaded(name: str, place: Path, device_map: Any = None, **given: Any) -> Any:
    """Return an empty model filled from a checkpoint; on the device as a whole unless a map says otherwise."""
    with init_empty_weights():
        empty = Model(*SIZES).eval()
    return load_and_quantize_model(
        empty, config(name), weights_location=place, device_map=device_map or {"": HERE}, **given
    )


def saved_packed(name: str, place: Path, folder: Path) -> nn.Module:
    """Return a model that was packed on the device and saved: a CPU that packs may round another way."""
    model: nn.Module = loaded(name, place)
    Accelerator().save_model(model, folder / "saved")
    return model


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    """Return what a model makes of all words."""
    found: Tensor = model(torch.arange(16, device=DEVICE)[None])
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_bitsandbytes_by_hand(trained: Model, weights: Path, name: str) -> None:
    """A model loaded packed onto the device computes bit for bit what layers do that bitsandbytes packed by hand."""
    model = loaded(name, weights)
    assert {each.device for each in (*model.parameters(), *model.buffers())} == {DEVICE}
    assert torch.equal(run(model), run(by_hand(trained, config(name), DEVICE)))
    plain = run(copy.deepcopy(trained).to(DEVICE)).float()
    assert 0 < (run(model).float() - plain).norm() / plain.norm() < 0.15


@pytest.mark.parametrize("name", CONFIGS)
def test_no_more_than_a_layer_is_unpacked_at_a_time(weights: Path, name: str) -> None:
    """While a model is loaded, the device holds its packed bytes and one layer in half precision."""
    loaded(name, weights)  # what libraries keep
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    model = loaded(name, weights)
    torch.cuda.synchronize()
    peak, held = (each(DEVICE) - before for each in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
    layer, count = 2 * WIDTH * INNER, 6
    others = (each for key, each in model.named_parameters() if not key.endswith(("up.weight", "down.weight")))
    plain = sum(each.nbytes for each in others)
    packed = count * layer // (2 if name.startswith("8bit") else 4)
    assert held <= 1.15 * packed + plain + 2**16  # scales, and blocks of the allocator
    assert peak <= held + 1.1 * layer


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_parts_that_wait_elsewhere_compute_the_same(weights: Path, tmp_path: Path, name: str, place: str) -> None:
    """Packed parts come from the CPU or from disk for their forward alone, and outputs are the same to the bit."""
    expected = run(saved_packed(name, weights, tmp_path))
    places = {"scale": HERE, "emb": HERE, "blocks.0": HERE, "blocks.1": place, "blocks.2": place, "head": HERE}
    model = loaded(name, tmp_path / "saved", places, offload_folder=tmp_path / "off")
    run(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(DEVICE) == before
    away = [each for key, each in model.named_parameters() if "blocks.1" in key or "blocks.2" in key]
    assert {each.device.type for each in away} <= {"cpu", "meta"}


@pytest.mark.parametrize("name", SOME)
def test_a_map_made_for_little_memory_computes_the_same(weights: Path, tmp_path: Path, name: str) -> None:
    """With room for some of it, `auto` leaves the rest on the CPU, and outputs are the same to the bit."""
    expected = run(saved_packed(name, weights, tmp_path))
    room = {HERE: (3 if name == "8bit" else 2) * WIDTH * INNER, "cpu": "1GiB"}  # for two blocks of three at most
    model = loaded(name, tmp_path / "saved", "auto", max_memory=room, no_split_module_classes=["Block"])
    assert {str(each) for each in model.hf_device_map.values()} >= {str(HERE), "cpu"}
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", ["device", "cpu"])
def test_saving_and_loading_is_exact(weights: Path, tmp_path: Path, name: str, place: str) -> None:
    """`save_model` writes a packed model from which loading gives the same bits, also where a part of it waits."""
    places = None if place == "device" else {"scale": HERE, "emb": HERE, "blocks": "cpu", "head": HERE}
    if place == "cpu" and name not in SOME:
        pytest.skip("one case of 8 bits and one of 4")
    model = loaded(name, weights, places)
    expected = run(model)
    Accelerator().save_model(model, tmp_path / "saved")
    assert torch.equal(run(model), expected)
    assert torch.equal(run(loaded(name, tmp_path / "saved")), expected)
    size = (tmp_path / "saved" / "model.safetensors").stat().st_size
    assert size < (weights / "model.safetensors").stat().st_size / 3


@pytest.mark.parametrize("name", SOME)
def test_what_was_packed_on_the_device_computes_on_a_cpu(weights: Path, tmp_path: Path, name: str) -> None:
    """A checkpoint that was packed here loads on a CPU, and outputs are near."""
    expected = run(saved_packed(name, weights, tmp_path)).float().cpu()
    moved = loaded(name, tmp_path / "saved", {"": "cpu"})
    with torch.no_grad():
        found = moved(torch.arange(16)[None]).float()
    assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("name", SOME)
def test_what_is_not_packed_trains(weights: Path, name: str) -> None:
    """Through `prepare`, a head on packed frozen layers trains as in a loop of plain PyTorch, on the device."""

    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = loaded(name, weights)
        for key, each in model.named_parameters():
            each.requires_grad_(key.startswith("head"))
        model.head.float()
        model.head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)

    index, labels = torch.arange(16, device=DEVICE)[None], torch.arange(16, device=DEVICE).flip(0)
    twin, plain = made()
    ours, optimizer = made()
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(ours, optimizer)
    losses = []
    for _ in range(4):
        nn.functional.cross_entropy(twin(index)[0], labels).backward()
        plain.step()
        plain.zero_grad()
        loss = nn.functional.cross_entropy(model(index)[0], labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert torch.equal(model.head.weight, twin.head.weight)
