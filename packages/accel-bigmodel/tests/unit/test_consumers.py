"""What transformers, peft, diffusers and compressed-tensors read, write and call on hooks."""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accel_bigmodel
from accel_bigmodel import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    OffloadedWeightsLoader,
    PrefixedDataset,
    UserCpuOffloadHook,
    add_hook_to_module,
    cpu_offload,
    cpu_offload_with_hook,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    named_module_tensors,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(2, 3)


def rebuilt(hook: ModelHook) -> ModelHook:
    """Build a hook again as transformers, peft and diffusers do: its class by name, its attributes by signature."""
    cls = getattr(accel_bigmodel, type(hook).__name__)
    wanted = inspect.signature(cls.__init__).parameters
    made: ModelHook = cls(**{name: value for name, value in hook.__dict__.items() if name in wanted})
    return made


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[nn.Module, nn.Module, Path]:
    """A model in memory, the same one with its second half on disk, and the file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    with init_empty_weights():
        empty = copy.deepcopy(model)
        for module in empty.modules():
            for name, parameter in list(module._parameters.items()):
                assert parameter is not None
                module.register_parameter(name, parameter)
    return model, load_checkpoint_and_dispatch(empty, file, device_map={"0": "cpu", "1": "disk"}), file


@pytest.mark.parametrize(
    "hook",
    [
        AlignDevicesHook(CPU, io_same_device=True, skip_keys=["cache"]),
        CpuOffload(CPU),
        accel_bigmodel.LayerwiseCastingHook(torch.float16, torch.float32, False),
    ],
)
def test_a_hook_is_rebuilt_from_its_init_attributes(hook: ModelHook) -> None:
    """Every constructor argument is an attribute of the same name, so that consumers can build the hook again."""
    twin = rebuilt(hook)
    for name in inspect.signature(type(hook).__init__).parameters:
        if name != "self":
            assert getattr(twin, name) == getattr(hook, name)


def test_a_rebuilt_offloading_hook_still_loads(on_disk: tuple[nn.Module, nn.Module, Path]) -> None:
    """Replacing every hook by its rebuilt twin leaves the outputs as they were."""
    model, dispatched, _ = on_disk
    for module in dispatched.modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None:
            twin = rebuilt(hook)
            remove_hook_from_module(module)
            add_hook_to_module(module, twin)
    assert torch.equal(dispatched(X), model(X))


def test_peft_reads_the_file_of_a_disk_weight(on_disk: tuple[nn.Module, nn.Module, Path]) -> None:
    """The index names the safetensors file, and the original devices say that the weight is on disk."""
    _, dispatched, file = on_disk
    hook = dispatched[1][0]._hf_hook
    assert hook.offload
    assert torch.device("meta") in hook.original_devices.values()
    assert hasattr(hook.weights_map, "dataset")
    index = hook.weights_map.dataset.index
    name = next(iter(dict(hook.weights_map.dataset)))
    assert index[name]["safetensors_file"] == str(file)
    assert hook.weights_map.prefix == "1.0."


def test_peft_merges_into_a_loaded_layer(on_disk: tuple[nn.Module, nn.Module, Path]) -> None:
    """`pre_forward` without inputs, an in-place change, a new weights map, `post_forward`: the change is used."""
    model, dispatched, _ = on_disk
    layer = dispatched[1][2]
    hook = layer._hf_hook
    hook.pre_forward(layer)
    layer.weight.data += 1
    hook.weights_map = {name: tensor.to("cpu") for name, tensor in named_module_tensors(layer)}
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.device.type == "meta"
    model[1][2].weight.data += 1
    for _ in range(2):
        assert torch.equal(dispatched(X), model(X))


def test_events_called_twice_change_nothing() -> None:
    """Loading a loaded module and sending away an absent one are harmless."""
    model = nn.Linear(3, 3)
    expected = model(X)
    cpu_offload(model, CPU)
    hook = model._hf_hook
    for _ in range(2):
        hook.pre_forward(model)
    assert torch.equal(nn.functional.linear(X, model.weight, model.bias), expected)
    for _ in range(2):
        hook.post_forward(model, None)
    assert model.weight.is_meta
    assert torch.equal(model(X), expected)


def test_one_hook_serves_two_modules() -> None:
    """A hook without a map keeps each module's own weights."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    expected = first(X), second(X)
    hook = AlignDevicesHook(CPU, offload=True)
    add_hook_to_module(first, hook)
    add_hook_to_module(second, hook)
    assert torch.equal(first(X), expected[0])
    assert torch.equal(second(X), expected[1])
    remove_hook_from_module(first)
    assert torch.equal(first(X), expected[0])
    assert torch.equal(second(X), expected[1])


def test_the_weights_map_is_read_at_every_load() -> None:
    """Another map, and another value in the same map, are both used by the next forward."""
    model = nn.Linear(3, 3, bias=False)
    hook = AlignDevicesHook(CPU, offload=True)
    add_hook_to_module(model, hook)
    hook.weights_map = {"weight": torch.eye(3)}
    assert torch.equal(model(X), X)
    hook.weights_map["weight"] = 2 * torch.eye(3)
    assert torch.equal(model(X), 2 * X)


def test_diffusers_reads_where_a_component_runs() -> None:
    """Class of the hook, its execution device, the first of a sequence, and the user's hook for offloading."""
    model, hook = cpu_offload_with_hook(nn.Linear(3, 3), CPU)
    assert isinstance(model._hf_hook, CpuOffload)
    assert torch.device(model._hf_hook.execution_device) == CPU
    assert isinstance(hook, UserCpuOffloadHook)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    assert isinstance(model._hf_hook.hooks[0], CpuOffload)
    hook.offload()
    hook.remove()
    assert not hasattr(model, "_hf_hook")


def test_transformers_writes_io_same_device() -> None:
    """The root's hook can be told to leave outputs where they are."""
    model = dispatch_model(nn.Sequential(nn.Linear(3, 3)), {"": "cpu"}, force_hooks=True)
    assert model._hf_hook.io_same_device
    model._hf_hook.io_same_device = False
    assert model(X).shape == X.shape


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("dispatch_model", ["offload_index", "skip_keys", "force_hooks"]),
        ("infer_auto_device_map", ["special_dtypes"]),
        ("attach_align_device_hook_on_blocks", ["tied_params_map"]),
    ],
)
def test_probed_parameters_exist(function: str, names: list[str]) -> None:
    """Consumers look for these parameters before they pass them."""
    parameters = inspect.signature(getattr(accel_bigmodel, function)).parameters
    assert set(names) <= set(parameters)


def test_compressed_tensors_updates_the_store() -> None:
    """The loader behind a prefixed map lists its keys and takes new values for weights in memory."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    cpu_offload(model, CPU, state_dict=dict(model.state_dict()))
    weights = model[0]._hf_hook.weights_map
    assert isinstance(weights, PrefixedDataset)
    weights.dataset[f"{weights.prefix}weight"] = torch.eye(3)
    assert torch.equal(model(X), X)
    store = OffloadedWeightsLoader(state_dict={"a": torch.ones(1)})
    assert store.all_keys == ["a"]


class Recorder(ModelHook):
    """Notes its events."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Note it."""
        self.log.append(f"init {self.name}")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note it."""
        self.log.append(f"pre {self.name}")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Note it."""
        self.log.append(f"post {self.name}")
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Note it."""
        self.log.append(f"detach {self.name}")
        return module


def test_hooks_replace_or_follow_each_other() -> None:
    """A second hook replaces the first, which is detached; with `append` both run, in order."""
    log: list[str] = []
    model = nn.Linear(3, 3)
    add_hook_to_module(model, Recorder("a", log))
    add_hook_to_module(model, Recorder("b", log))
    add_hook_to_module(model, Recorder("c", log), append=True)
    assert model._old_forward.__func__ is nn.Linear.forward
    model(input=X)
    remove_hook_from_module(model)
    assert log == [
        "init a", "detach a", "init b", "init c", "pre b", "pre c", "post b", "post c", "detach b", "detach c",
    ]  # fmt: skip
    assert "forward" not in model.__dict__


def test_a_replaced_forward_is_restored() -> None:
    """A forward that another library put on the module is called by the hook, and is back when the hook is gone."""
    model = nn.Linear(3, 3)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * nn.Linear.forward(model, x)

    model.forward = twice
    expected = twice(X)
    add_hook_to_module(model, ModelHook())
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert model.forward is twice


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_dispatched_model_are_their_own(on_disk: tuple[nn.Module, nn.Module, Path], way: str) -> None:
    """A copy runs its own forward on its own weights: changing the copy leaves the original alone."""
    model, dispatched, _ = on_disk
    twin = copy.deepcopy(dispatched) if way == "deepcopy" else pickle.loads(pickle.dumps(dispatched))
    assert torch.equal(twin(X), model(X))
    twin[0].weight.data.zero_()
    twin[1][0]._hf_hook.weights_map = {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}
    assert torch.equal(dispatched(X), model(X))
    assert not torch.equal(twin(X), model(X))
    remove_hook_from_submodules(twin)
    assert torch.equal(dispatched(X), model(X))


@pytest.mark.usefixtures("fresh_state")
def test_a_frozen_model_on_disk_is_prepared(on_disk: tuple[nn.Module, nn.Module, Path]) -> None:
    """What is not trained may wait on disk: prepared, it computes as before; with a weight to train it is refused."""
    model, dispatched, _ = on_disk
    with pytest.raises(PreparationError, match="weights on disk cannot be trained"):
        Accelerator(cpu=True).prepare(dispatched)
    dispatched.requires_grad_(False)
    assert torch.equal(Accelerator(cpu=True).prepare(dispatched)(X), model(X))
