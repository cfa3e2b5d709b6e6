"""What the documentation of big models says, on a CPU, where the tests of accel-bigmodel do not show it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import (
    Accelerator,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import (
    ModelHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from accelerate.utils import (
    compute_module_sizes,
    find_tied_parameters,
    get_max_layer_size,
    load_state_dict,
    retie_parameters,
    set_module_tensor_to_device,
)
from accelerate.utils.modeling import calculate_maximum_sizes

CPU = torch.device("cpu")
DATA = torch.linspace(-1, 1, 12).reshape(3, 4)


class Block(nn.Module):
    """A layer with a residual connection, which cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Run both layers around the connection."""
        return data + self.second(torch.relu(self.first(data)))


class Model(nn.Module):
    """Blocks, a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.register_buffer("scale", torch.tensor(2.0))
        self.head = nn.Linear(4, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Run everything."""
        return self.head(self.blocks(data)) * self.scale


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def _expected() -> torch.Tensor:
    return _model()(DATA)


@pytest.fixture
def checkpoint(tmp_path: Path, fresh_state: None) -> Path:
    """Save the model in shards."""
    Accelerator(cpu=True).save_model(_model(), tmp_path / "checkpoint", max_shard_size="0.2KB")
    return tmp_path / "checkpoint"


def test_checkpoint_with_limits_in_words_spills_to_the_disk(checkpoint: Path, tmp_path: Path) -> None:
    """What memory does not hold is offloaded to the folder, in the dtype asked for."""
    with init_empty_weights():
        model = Model()
    loaded = load_checkpoint_and_dispatch(
        model,
        checkpoint,
        device_map="auto",
        max_memory={"cpu": "0.1KB"},
        dtype=torch.float16,
        offload_folder=tmp_path / "offload",
        offload_buffers=True,
    )
    assert "disk" in loaded.hf_device_map.values()
    torch.testing.assert_close(loaded(DATA.half()), _expected().half(), atol=1e-2, rtol=1e-2)


def test_a_checkpoint_is_loaded_without_a_dispatch(checkpoint: Path) -> None:
    """The weights are the same without a map, and with a state dict that passes over the disk."""
    model = Model()
    load_checkpoint_in_model(model, checkpoint, device_map={"": "cpu"}, offload_state_dict=True)
    assert torch.equal(model(DATA), _expected())
    loaded = load_checkpoint_and_dispatch(Model(), checkpoint)
    assert torch.equal(loaded(DATA), _expected())
    assert not hasattr(loaded, "hf_device_map")


def test_hooks_can_switch_gradients_off() -> None:
    """A hook with `no_grad` runs the forward pass without a graph."""
    module, hook = nn.Linear(4, 4), ModelHook()
    hook.no_grad = True
    add_hook_to_module(module, hook)
    assert not module(DATA).requires_grad


@pytest.mark.parametrize("blocks", [False, True])
def test_hooks_are_attached_where_weights_are(blocks: bool) -> None:
    """Hooks come to submodules with weights of their own; by blocks, with a device and an answer for each."""
    model = _model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if blocks:
        parts = ("blocks.0", "blocks.1", "head")
        offload = {"blocks.0": True, "blocks.1": False, "head": True}
        attach_align_device_hook_on_blocks(model, dict.fromkeys(parts, CPU), offload=offload, weights_map=weights)
        assert model.blocks[1].first.weight.device == CPU
    else:
        attach_align_device_hook(model, CPU, offload=True, weights_map=weights)
        assert model.blocks[1].first.weight.device.type == "meta"
    assert model.head.weight.device.type == "meta"
    assert torch.equal(model(DATA), _expected())


def test_sizes_of_modules() -> None:
    """A module's size is that of all its tensors; the largest layer is a whole block where it is not split."""
    model = _model()
    sizes = compute_module_sizes(model)
    assert sizes[""] == sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    assert sizes["blocks"] == 2 * sizes["blocks.0"]
    assert compute_module_sizes(model, buffers_only=True)[""] == model.scale.element_size()
    largest, names = get_max_layer_size(list(model.named_children()), sizes, ["Block"])
    assert largest == sizes["blocks.0"]
    assert names == ["blocks.0", "blocks.1"]
    total, (size, _) = calculate_maximum_sizes(model)
    assert (total, size) == (sizes[""], sizes["blocks.0.first"])


def test_state_dict_of_a_file(checkpoint: Path, tmp_path: Path) -> None:
    """A file of either format is read, with a device map straight to its devices."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.bin")
    assert load_state_dict(str(tmp_path / "weights.bin"))["weight"].tolist() == [1, 1]
    shard = next(checkpoint.glob("*.safetensors"))
    for device_map in (None, {"": "cpu"}):
        assert all(tensor.device == CPU for tensor in load_state_dict(str(shard), device_map=device_map).values())


def test_ties_are_found_and_made_again() -> None:
    """Parameters that were one are found, and are one again after the tie broke."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    tied = find_tied_parameters(model)
    assert [sorted(group) for group in tied] == [["0.weight", "1.weight"]]
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    retie_parameters(model, tied)
    assert model[1].weight is model[0].weight


def test_a_tensor_is_set_on_a_device() -> None:
    """A parameter moves, gets a value when it comes from the meta device, and a dtype where one is given."""
    model = nn.Linear(2, 2)
    set_module_tensor_to_device(model, "weight", "meta")
    assert model.weight.device.type == "meta"
    with pytest.raises(ValueError, match=r"weight"):
        set_module_tensor_to_device(model, "weight", "cpu")
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(2, 2), dtype=torch.float16)
    assert model.weight.dtype is torch.float16
    assert model.weight.sum().item() == 4
