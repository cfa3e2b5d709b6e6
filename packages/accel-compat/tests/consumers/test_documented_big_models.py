"""What the documentation of big models says and shows, on a CPU: a test for each function and example."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import (
    Accelerator,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import (
    OffloadedWeightsLoader,
    align_module_device,
    compute_module_sizes,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    has_offloaded_params,
    load_offloaded_weights,
    load_state_dict,
    offload_state_dict,
    retie_parameters,
    save_offload_index,
    set_module_tensor_to_device,
)
from accelerate.utils.modeling import calculate_maximum_sizes
from accelerate.utils.offload import offload_weight

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


def test_empty_weights_take_no_memory() -> None:
    """A model of a hundred billion parameters is made at once, all of them on the meta device."""
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e11
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    with pytest.raises(NotImplementedError):
        model.to("cpu")


@pytest.mark.parametrize(("include", "expected"), [(None, "cpu"), (False, "cpu"), (True, "meta")])
def test_buffers_of_empty_models(include: bool | None, expected: str) -> None:
    """Buffers are real unless they are included."""
    with init_empty_weights(include_buffers=include):
        model = Model()
    assert model.scale.device.type == expected
    assert model.head.weight.device.type == "meta"
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_models_are_made_on_a_device() -> None:
    """The device of a block is where parameters are made, and buffers where they are included."""
    with init_on_device(torch.device("meta"), include_buffers=True):
        model = Model()
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_cpu_offload_keeps_one_copy(offload_buffers: bool) -> None:
    """Between passes the weights are in the state dict alone; a pass gives what the model gave."""
    model = cpu_offload(_model(), execution_device=CPU, offload_buffers=offload_buffers)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert model.scale.device.type == ("meta" if offload_buffers else "cpu")
    assert torch.equal(model(DATA), _expected())
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_cpu_offload_from_a_state_dict() -> None:
    """A state dict that is given is what the weights come from."""
    model = cpu_offload(Model(), execution_device=CPU, state_dict=_model().state_dict())
    assert torch.equal(model(DATA), _expected())


def test_preloaded_classes_load_their_submodules() -> None:
    """A layer that uses its submodules' weights without calling them is loaded as a whole."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return data @ self.dense.weight + self.dense.bias

    model = Direct()
    expected = model(DATA)
    offloaded = cpu_offload(model, execution_device=CPU, preload_module_classes=["Direct"])
    assert torch.equal(offloaded(DATA), expected)


def test_offload_with_hooks_in_a_pipeline() -> None:
    """Three models run in turn, the second in a loop, and hooks offload them by hand."""
    models = [nn.Linear(4, 4) for _ in range(3)]
    hidden = DATA
    expected = models[2](models[1](models[1](models[0](hidden))))
    model_1, hook_1 = cpu_offload_with_hook(models[0], CPU)
    model_2, hook_2 = cpu_offload_with_hook(models[1], CPU, prev_module_hook=hook_1)
    model_3, hook_3 = cpu_offload_with_hook(models[2], CPU, prev_module_hook=hook_2)
    hidden = model_1(hidden)
    for _ in range(2):
        hidden = model_2(hidden)
    assert torch.equal(model_3(hidden), expected)
    hook_3.offload()
    assert model_3.weight.device == CPU
    hook_3.remove()
    assert not hasattr(model_3, "_hf_hook")


def test_disk_offload_and_again(tmp_path: Path) -> None:
    """Weights lie in the folder as memory-mapped arrays; a folder that holds them already is used."""
    model = disk_offload(_model(), tmp_path / "weights", execution_device=CPU)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert torch.equal(model(DATA), _expected())
    assert (tmp_path / "weights" / "index.json").exists()
    with init_empty_weights():
        again = Model()
    again.scale = torch.tensor(2.0)
    assert torch.equal(disk_offload(again, tmp_path / "weights", execution_device=CPU)(DATA), _expected())


DEVICE_MAPS: dict[str, dict[str, Any]] = {
    "one device": {"": "cpu"},
    "cpu and disk": {"blocks.0": "cpu", "blocks.1": "disk", "head": "disk", "scale": "cpu"},
    "all on disk": {"": "disk"},
}


@pytest.mark.parametrize("name", DEVICE_MAPS)
def test_dispatched_models_give_the_same(name: str, tmp_path: Path) -> None:
    """A model gives what it gave, however its parts are spread, and knows its map."""
    device_map = DEVICE_MAPS[name]
    model = dispatch_model(_model(), device_map, main_device=CPU, offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(model(DATA), _expected())
    assert model.hf_device_map == device_map


def test_disk_needs_a_folder() -> None:
    """Parts for the disk without a folder are an error, which is a ValueError."""
    with pytest.raises(ValueError, match=r"(?i)folder|offload_dir"):
        dispatch_model(_model(), {"": "disk"}, main_device=CPU)


def test_device_map_must_name_everything() -> None:
    """A map that leaves weights without a place is an error, which is a ValueError."""
    with pytest.raises(ValueError, match=r"head"):
        dispatch_model(_model(), {"blocks": "cpu"})


@pytest.mark.parametrize("cpu", [250, "0.25KB", "2Kb"])
def test_device_map_is_inferred_within_the_limits(cpu: int | str) -> None:
    """No device gets more than it holds, blocks stay whole, and the rest goes to the disk."""
    model = _model()
    device_map = infer_auto_device_map(model, max_memory={"cpu": cpu}, no_split_module_classes=["Block"])
    assert not any(name.startswith(("blocks.0.", "blocks.1.")) for name in device_map)
    assert "disk" in device_map.values()
    sizes = compute_module_sizes(model)
    assert sum(sizes[name] for name, device in device_map.items() if device == "cpu") <= 250


def test_device_map_of_a_model_without_weights() -> None:
    """Sizes and dtypes are enough: a model on the meta device has the map of the real one."""
    with init_empty_weights():
        empty = Model()
    limits: dict[int | str, int | str] = {"cpu": 250}
    assert infer_auto_device_map(empty, dict(limits)) == infer_auto_device_map(_model(), dict(limits))


def test_dtypes_count_in_the_device_map() -> None:
    """Weights that will be loaded in half the size take half the room; special ones are counted apart."""
    model = _model()
    sizes = compute_module_sizes(model, dtype="float16")
    assert sizes["head"] == compute_module_sizes(model)["head"] // 2
    special = compute_module_sizes(model, dtype=torch.float16, special_dtypes={"head.weight": torch.float32})
    assert special["head.weight"] == 2 * sizes["head.weight"]
    room = {"cpu": sizes[""] + 64}
    assert infer_auto_device_map(model, dict(room), dtype=torch.float16) == {"": "cpu"}


def test_results_can_be_left_uncleaned() -> None:
    """Without cleaning, parts that go to one device are listed one by one."""
    whole = infer_auto_device_map(_model(), {"cpu": "1GB"})
    parts = infer_auto_device_map(_model(), {"cpu": "1GB"}, clean_result=False)
    assert whole == {"": "cpu"}
    assert len(parts) > 1
    assert set(parts.values()) == {"cpu"}


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential", {"": "cpu"}, None])
def test_checkpoint_is_loaded_and_dispatched(checkpoint: Path, tmp_path: Path, device_map: Any) -> None:
    """An empty model gets the weights of a checkpoint in shards; without a map nothing is dispatched."""
    with init_empty_weights():
        model = Model()
    if device_map is None:
        model = Model()
    loaded = load_checkpoint_and_dispatch(
        model, checkpoint, device_map=device_map, no_split_module_classes=["Block"], offload_folder=tmp_path / "offload"
    )
    assert torch.equal(loaded(DATA), _expected())
    assert hasattr(loaded, "hf_device_map") == (device_map is not None)


@pytest.mark.parametrize("place", ["folder", "index", "file"])
def test_checkpoint_may_be_a_file_or_a_folder(place: str, checkpoint: Path, tmp_path: Path) -> None:
    """A folder, the index in it and a file with everything are all read."""
    torch.save(_model().state_dict(), tmp_path / "whole.bin")
    places = {
        "folder": checkpoint,
        "index": checkpoint / "model.safetensors.index.json",
        "file": tmp_path / "whole.bin",
    }
    model = Model()
    load_checkpoint_in_model(model, str(places[place]))
    assert torch.equal(model(DATA), _expected())


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


def test_state_dict_may_pass_over_the_disk(checkpoint: Path) -> None:
    """With `offload_state_dict` the weights of the CPU are the same."""
    model = Model()
    load_checkpoint_in_model(model, checkpoint, device_map={"": "cpu"}, offload_state_dict=True)
    assert torch.equal(model(DATA), _expected())


def test_modules_are_kept_in_fp32(checkpoint: Path) -> None:
    """Everything is loaded in the dtype asked for but the modules that are named."""
    model = Model()
    load_checkpoint_in_model(model, checkpoint, dtype=torch.float16, keep_in_fp32_modules=["head"])
    assert model.head.weight.dtype is torch.float32
    assert model.blocks[0].first.weight.dtype is torch.float16


def test_strict_loading_refuses_other_keys(checkpoint: Path) -> None:
    """With `strict`, keys that do not match are an error; without, they are passed over."""
    model = Model()
    model.extra = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=r"extra"):
        load_checkpoint_in_model(model, checkpoint, strict=True)
    load_checkpoint_in_model(model, checkpoint, strict=False)
    assert torch.equal(model(DATA), _expected())


class Doubling(ModelHook):
    """Doubles what goes in, adds one to what comes out, and notes what is called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Come to a module."""
        self.called.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Double the arguments."""
        self.called.append("pre")
        return tuple(2 * item for item in args), kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        """Add one."""
        self.called.append("post")
        return output + 1

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave a module."""
        self.called.append("detach")
        return module


def test_hooks_run_around_forward() -> None:
    """A hook changes arguments and output, is told when it comes and goes, and leaves the module as it was."""
    module, hook = nn.Linear(4, 4), Doubling()
    before = module.forward
    assert add_hook_to_module(module, hook) is module
    assert torch.equal(module(DATA), before(2 * DATA) + 1)
    assert remove_hook_from_module(module) is module
    assert torch.equal(module(DATA), before(DATA))
    assert hook.called == ["init", "pre", "post", "detach"]
    assert not hasattr(module, "_hf_hook")


def test_hooks_are_replaced_or_chained() -> None:
    """A second hook takes the first one's place, or with `append` comes after it."""
    module = nn.Linear(4, 4)
    before = module.forward
    add_hook_to_module(module, Doubling())
    add_hook_to_module(module, Doubling())
    assert torch.equal(module(DATA), before(2 * DATA) + 1)
    add_hook_to_module(module, Doubling(), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert torch.equal(module(DATA), before(4 * DATA) + 2)


def test_hooks_can_switch_gradients_off() -> None:
    """A hook with `no_grad` runs the forward pass without a graph."""
    module, hook = nn.Linear(4, 4), ModelHook()
    hook.no_grad = True
    add_hook_to_module(module, hook)
    assert not module(DATA).requires_grad


def test_hooks_of_submodules_are_removed() -> None:
    """Hooks go from a module and everything inside it."""
    for remove in (remove_hook_from_submodules, lambda model: remove_hook_from_module(model, recurse=True)):
        model = _model()
        attach_execution_device_hook(model, CPU)
        assert hasattr(model.head, "_hf_hook")
        remove(model)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_devices_are_aligned() -> None:
    """A hook with `offload` brings weights for a pass and takes them away; the output is where the input was."""
    module = nn.Linear(4, 4)
    expected = module(DATA)
    add_hook_to_module(module, AlignDevicesHook(execution_device=CPU, offload=True, io_same_device=True))
    assert module.weight.device.type == "meta"
    assert has_offloaded_params(module)
    output = module(DATA)
    assert torch.equal(output, expected)
    assert output.device == DATA.device
    remove_hook_from_module(module)
    assert module.weight.device == CPU
    assert not has_offloaded_params(module)


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


def test_module_is_aligned_for_a_block() -> None:
    """Inside the block weights are on the device, offloaded or not; after it they are where they were."""
    model = cpu_offload(_model(), execution_device=CPU)
    with align_module_device(model.head, execution_device=CPU):
        assert torch.equal(model.head.weight, _model().head.weight)
    assert model.head.weight.device.type == "meta"
    plain = nn.Linear(1, 1)
    with align_module_device(plain, execution_device="meta"):
        assert plain.weight.device.type == "meta"
    assert plain.weight.device == CPU


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


def test_balanced_memory_without_accelerators() -> None:
    """Without an accelerator there is nothing to balance: the limits stay."""
    assert get_balanced_memory(_model(), max_memory={"cpu": 1000}) == {"cpu": 1000}


def test_offloaded_state_dicts_are_read_again(tmp_path: Path) -> None:
    """A state dict in a folder is read one tensor at a time, or put into a model."""
    state = _model().state_dict()
    offload_state_dict(tmp_path, state)
    found = OffloadedWeightsLoader(save_folder=tmp_path)
    assert set(found) == set(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_offloaded_weights_are_loaded_into_a_model(tmp_path: Path) -> None:
    """The weights of an index fill a model."""
    index: dict[str, Any] = {}
    for name, tensor in _model().state_dict().items():
        index = offload_weight(tensor, name, tmp_path, index)
    save_offload_index(index, tmp_path)
    model = Model()
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model(DATA), _expected())


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
