"""Models spread over a GPU, the CPU and the disk compute what they do on the GPU alone."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    align_module_device,
    attach_layerwise_casting_hooks,
    check_device_map,
    compute_module_sizes,
    cpu_offload,
    cpu_offload_with_hook,
    dispatch_model,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    set_module_tensor_to_device,
)
from accel_bigmodel.__main__ import main
from accel_testing.requires import requires

pytestmark = pytest.mark.filterwarnings(
    "ignore:You are calling .generate.. with the `input_ids` being on a device type"
)

DEVICE = torch.device("cuda", 0)


def llama(tied: bool) -> Any:
    """Make a Llama of some MiB in bf16, the same each time."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def spread(model: nn.Module, folder: Path) -> nn.Module:
    """Put about half of a model on the device, and the rest on the CPU and the disk."""
    size = compute_module_sizes(model)[""]
    room: dict[int | str, int | str] = {0: size * 5 // 10, "cpu": size * 4 // 10, "disk": size}
    assert get_balanced_memory(model, room, ["LlamaDecoderLayer"]) == room  # one device has nobody to share with
    places = infer_auto_device_map(model, room, ["LlamaDecoderLayer"])
    check_device_map(model, places)
    assert set(places.values()) == {0, "cpu", "disk"}
    return dispatch_model(model, places, offload_dir=folder)


@requires("transformers")
@pytest.mark.parametrize("inputs_on", ["cpu", "cuda"])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_spread_llama_computes_the_same(tied: bool, inputs_on: str, tmp_path: Path) -> None:
    """Logits are the plain model's bit for bit, on the device that the tokens came from; so is generated text."""
    model = llama(tied)
    plain = copy.deepcopy(model).to(DEVICE)
    model = spread(model, tmp_path)
    words = torch.arange(3, 15, device=DEVICE).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], device=DEVICE)
    for _ in range(2):
        logits = model(words.to(inputs_on)).logits
        assert logits.device.type == inputs_on
        assert torch.equal(logits.to(DEVICE), plain(words).logits)
    for cache in (None, "static"):
        arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
        arguments["disable_compile"] = True
        wanted = plain.generate(words, attention_mask=mask, **arguments)
        found = model.generate(words.to(inputs_on), attention_mask=mask.to(inputs_on), **arguments)
        assert torch.equal(found.to(DEVICE), wanted)


class Nested(nn.Module):
    """A model with a buffer that takes and returns nested values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("shift", torch.rand(64))
        self.register_buffer("scratch", torch.rand(64), persistent=False)

    def forward(self, x: torch.Tensor, *, pair: tuple[torch.Tensor, dict[str, Any]], form: str) -> Any:
        """Return what is asked for."""
        y = self.second(self.first(x) + pair[0] * pair[1]["scale"]) + self.shift * self.scratch
        return {"tuple": (y, [x]), "dict": {"y": y, "x": [x, 3]}}[form]


def leaves(value: Any) -> list[torch.Tensor]:
    """List the tensors of a nest."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return [leaf for item in inner if not isinstance(item, int) for leaf in leaves(item)]


@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("buffers", [False, True])
@torch.no_grad()
def test_nested_values_travel(buffers: bool, form: str) -> None:
    """Tuples, dicts and keywords from the CPU are computed with, and outputs are where inputs were."""
    model = Nested()
    plain = copy.deepcopy(model).to(DEVICE)
    places = {"first": "cpu", "second": 0, "shift": "cpu", "scratch": 0}
    model = dispatch_model(model, places, offload_buffers=buffers)
    x, other, scale = torch.randn(4, 64), torch.randn(4, 64), torch.rand(64)
    wanted = plain(x.to(DEVICE), pair=(other.to(DEVICE), {"scale": scale.to(DEVICE)}), form=form)
    for device in (torch.device("cpu"), DEVICE):
        found = model(x.to(device), pair=(other.to(device), {"scale": scale.to(device)}), form=form)
        for ours, theirs in zip(leaves(found), leaves(wanted), strict=True):
            assert ours.device == device
            assert torch.equal(ours.to(DEVICE), theirs)


NAMES = [0, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)]


@pytest.mark.parametrize("name", NAMES, ids=repr)
@torch.no_grad()
def test_one_device_has_many_names(name: Any) -> None:
    """However a map and a call name the device, tensors are on it, and outputs are the plain model's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(4, 64, device=DEVICE)
    expected = copy.deepcopy(model).to(DEVICE)(x)
    model = dispatch_model(model, {"0": name, "1": "cpu", "2": 0, "3": "cuda:0"})
    assert model[0].weight.device == model[2].weight.device == DEVICE
    assert torch.equal(model(x), expected)
    layer = nn.Linear(4, 4)
    for _ in range(2):
        set_module_tensor_to_device(layer, "weight", name, non_blocking=True)
        assert layer.weight.device == DEVICE
    before = layer.weight
    set_module_tensor_to_device(layer, "weight", name)
    assert layer.weight is before
    moved, hook = cpu_offload_with_hook(nn.Linear(64, 64), name)
    assert moved(x.cpu()).device == moved.weight.device == DEVICE
    hook.offload()
    assert moved.weight.device.type == "cpu"


def test_memory_is_that_of_the_device() -> None:
    """Every call finds the one device and the CPU, with no more than there is; limits that are given stand."""
    for _ in range(3):
        found = get_max_memory()
        assert list(found) == [0, "cpu"]
        assert 0 < found[0] <= torch.cuda.mem_get_info(DEVICE)[1]
    assert get_max_memory({"cpu": 5, "0": "1GiB"}) == {0: 2**30, "cpu": 5}


@pytest.mark.parametrize("where", ["cpu", "cuda:0", None])
@torch.no_grad()
def test_aligned_weights_can_be_written(where: str | None) -> None:
    """What is written to an offloaded module's weights while they are on any device is computed with afterwards."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 64, device=DEVICE)
    plain = copy.deepcopy(model).to(DEVICE)
    model = cpu_offload(model, DEVICE)
    assert torch.equal(model(x), plain(x))
    with align_module_device(model[0], None if where is None else torch.device(where)):
        assert model[0].weight.device == torch.device(where or DEVICE)
        model[0].weight.mul_(2)
    plain[0].weight.mul_(2)
    assert model[0].weight.is_meta
    assert torch.equal(model(x), plain(x))


@torch.no_grad()
def test_models_take_turns_on_the_device() -> None:
    """A chain as diffusers makes it: one model at a time is on the device, round after round."""
    torch.manual_seed(0)
    models = [nn.Linear(256, 256) for _ in range(3)]
    plain = [copy.deepcopy(model).to(DEVICE) for model in models]
    hooks: list[Any] = []
    for model in models:
        hooks.append(cpu_offload_with_hook(model, DEVICE, hooks[-1] if hooks else None)[1])
    for _ in range(2):
        x = y = torch.randn(8, 256)
        for model, twin in zip(models, plain, strict=True):
            x, y = model(x), twin(y.to(DEVICE))
            assert [each.weight.is_cuda for each in models] == [each is model for each in models]
            assert torch.equal(x, y)
        hooks[-1].offload()
    assert not any(each.weight.is_cuda for each in models)


@torch.no_grad()
def test_layers_are_stored_in_8_bits() -> None:
    """Weights in float8 on the device are computed with in bf16, as by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(DEVICE, torch.bfloat16)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.copy_(parameter.to(torch.float8_e4m3fn))
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, non_blocking=True)
    x = torch.randn(4, 64, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(2):
        assert model[0].weight.dtype == torch.float8_e4m3fn
        assert torch.equal(model(x), plain(x))


@requires("transformers")
def test_estimates_need_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration alone is counted, in the dtype that is asked for."""
    llama(False).config.save_pretrained(tmp_path)
    assert main(["estimate-memory", str(tmp_path), "--dtypes", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
