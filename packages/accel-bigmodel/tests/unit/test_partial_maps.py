"""Device maps written by hand name the blocks; buffers that are in no checkpoint need no device."""

import copy
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel import (
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_core.checkpoint.weights import save_model
from accel_core.errors import DeviceMapError, OffloadError, OffloadFolderError

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4)


class Turn(nn.Module):
    """Nothing but a buffer that no state dict holds, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.linspace(1.0, 2.0, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the input."""
        return x * self.frequency


class Turned(nn.Module):
    """Layers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all."""
        return self.layers(self.turn(x)) * self.kept


@pytest.mark.parametrize(
    "places",
    [
        {"layers": "cpu", "kept": "cpu"},
        {"layers.0": "cpu", "layers.1": "disk", "kept": "cpu"},
        {"layers": "disk", "kept": "disk"},
    ],
)
def test_a_map_need_not_name_what_no_state_dict_holds(places: dict[str, str], tmp_path: Path) -> None:
    """Loaded and dispatched by such a map, the model computes what it does in memory."""
    plain = Turned().eval()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = Turned().eval()
    loaded = load_checkpoint_and_dispatch(empty, tmp_path, device_map=places)
    placed = dispatch_model(copy.deepcopy(plain), places, offload_dir=tmp_path / "folder")
    for model in (loaded, placed):
        assert torch.equal(model(X), plain(X))
    with pytest.raises(DeviceMapError, match=r"for the following parameters: kept; got devices"):
        dispatch_model(plain, {"layers": "cpu"})


@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_saving_where_the_weights_are_read_from_goes_on_working(kind: str, tmp_path: Path) -> None:
    """The files are replaced under the model: it computes and is saved as before, and the new files hold it whole."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    if kind == "checkpoint":
        save_file(plain.state_dict(), tmp_path / "model.safetensors")
        model = load_checkpoint_and_dispatch(model, tmp_path, device_map={"0": "cpu", "1": "disk"})
    else:
        disk_offload(model, tmp_path, CPU)
    before = os.stat(tmp_path / "model.safetensors").st_ino if kind == "checkpoint" else None
    for size in ("10GB", 80):
        save_model(model, None, tmp_path, max_shard_size=size)
        assert torch.equal(model(X), plain(X))
        again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        load_checkpoint_in_model(again, tmp_path, strict=True)
        assert torch.equal(again(X), plain(X))
    assert not (tmp_path / "model.safetensors").exists()
    assert before is None or before not in {path.stat().st_ino for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors", "0.weight.dat"])
def test_a_file_that_was_overwritten_in_place_is_an_error(name: str, tmp_path: Path) -> None:
    """Other bytes in a checkpoint or an offload folder would be other weights; nothing is computed with them."""
    plain, file = nn.Sequential(nn.Linear(4, 4)), tmp_path / name
    model = copy.deepcopy(plain)
    if file.suffix == ".dat":
        disk_offload(model, tmp_path, CPU)
    else:
        save_file(plain.state_dict(), file)
        load_checkpoint_and_dispatch(model, file, device_map={"": "disk"})
    assert torch.equal(model(X), plain(X))
    content = file.read_bytes()
    os.utime(file, ns=(1, 1))
    with pytest.raises(OffloadError, match=f"changed after the model was dispatched; got .*{name}"):
        model(X)
    assert file.read_bytes() == content


def test_weights_on_disk_without_a_folder_are_a_value_error(tmp_path: Path) -> None:
    """Without a folder, or with one that cannot be made, the error says so, and the model is as it was."""
    model, file, taken = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path / "model.bin", tmp_path / "taken"
    torch.save(model.state_dict(), file)
    taken.touch()
    places = {"0": "cpu", "1": "disk"}
    for call in (
        lambda: dispatch_model(model, places),
        lambda: load_checkpoint_in_model(model, file, device_map=places),
    ):
        with pytest.raises(OffloadFolderError, match="offload_") as caught:
            call()
        assert isinstance(caught.value, OffloadError)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(OffloadError, match="cannot be written"):
        load_checkpoint_in_model(model, file, device_map=places, offload_folder=taken)
    with pytest.raises(OffloadError, match=r"cannot be made.*taken"):
        disk_offload(model, taken, CPU)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("spare", "warned"), [(0, True), (63, True), (64, False)])
def test_buffers_are_warned_of_beside_the_largest_layer(
    spare: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """The largest offloaded layer is on the device together with the buffers of all offloaded layers."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False, device="meta") for _ in range(3)])
    for layer in model[1:]:
        layer.register_buffer("scale", torch.empty(8, device="meta"))
    # 64 bytes on the device, 96 kept for the layer that comes, 64 of buffers.
    places = infer_auto_device_map(model, {0: 64 + 96 + spare, "cpu": 10_000})
    assert places == {"0": 0, "1": "cpu", "2": "cpu"}
    assert ["buffers of the offloaded layers" in str(each.message) for each in recwarn] == [True] * warned
    recwarn.clear()
    infer_auto_device_map(model, {0: 64 + 96 + spare, "cpu": 10_000}, offload_buffers=True)
    assert not recwarn.list


@pytest.mark.slow
def test_a_map_written_by_hand_places_a_llama(tmp_path: Path) -> None:
    """Transformers' own class, whose rotary buffer such maps leave out, answers and generates as it does in memory."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, not installed here")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    plain.save_pretrained(tmp_path)
    places = {f"model.layers.{number}": device for number, device in enumerate(("cpu", "cpu", "disk"))}
    places = {"model.embed_tokens": "cpu", **places, "model.norm": "cpu", "lm_head": "disk"}
    with init_empty_weights():
        empty = transformers.LlamaForCausalLM(config).eval()
    model = load_checkpoint_and_dispatch(empty, tmp_path, device_map=places)
    tokens = torch.arange(3, 13)[None]
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    asked = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(tokens, **asked), plain.generate(tokens, **asked))


class Scaled(nn.Sequential):
    """Layers, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale what the layers give."""
        output: torch.Tensor = super().forward(x) * self.logit_scale
        return output


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_root_with_a_parameter_of_its_own_has_one_hook(place: str, tmp_path: Path) -> None:
    """The root's hook knows the weights that are away, as transformers asks for, and the model computes the same."""
    plain = Scaled()
    model = dispatch_model(copy.deepcopy(plain), {"": place}, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(model(X), plain(X))
    if place == "disk":
        assert model.logit_scale.is_meta
        assert torch.equal(model._hf_hook.weights_map["logit_scale"], plain.logit_scale)
        assert model._hf_hook.io_same_device


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_clip_on_disk_is_saved_by_transformers(tmp_path: Path) -> None:
    """`save_pretrained` of a model on disk whose root has a parameter writes the weights it was loaded from."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, not installed here")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**small, "image_size": 8, "patch_size": 4}, projection_dim=8
    )
    plain = transformers.CLIPModel(config)
    plain.save_pretrained(tmp_path / "whole")
    with init_empty_weights():
        empty = transformers.CLIPModel(config)
    model = load_checkpoint_and_dispatch(
        empty, tmp_path / "whole", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    model.hf_device_map = {"": "disk"}
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == {name for name, _ in plain.named_parameters()}
    assert all(torch.equal(again[name], value) for name, value in plain.named_parameters())
