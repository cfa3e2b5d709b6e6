"""What transformers, peft, trl, diffusers and others read, write, call and replace."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelerate
import accelerate.hooks
import accelerate.utils
from accel_core.host.installed import version_of
from accel_core.options.engines import absent
from accel_testing import requires
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState

IMPORTS = {
    "accelerate": [
        "Accelerator", "DistributedType", "FullyShardedDataParallelPlugin", "PartialState", "cpu_offload",
        "cpu_offload_with_hook", "dispatch_model", "infer_auto_device_map", "init_empty_weights",
        "load_checkpoint_in_model",
    ],
    "accelerate.hooks": [
        "AlignDevicesHook", "CpuOffload", "ModelHook", "SequentialHook", "add_hook_to_module",
        "attach_align_device_hook_on_blocks", "remove_hook_from_module", "remove_hook_from_submodules",
    ],
    "accelerate.commands.launch": ["_validate_launch_command", "launch_command", "launch_command_parser"],
    "accelerate.logging": ["get_logger"],
    "accelerate.state": ["AcceleratorState", "PartialState"],
    "accelerate.utils": [
        "AORecipeKwargs", "CustomDtype", "DeepSpeedPlugin", "DistributedDataParallelKwargs", "DistributedType",
        "InitProcessGroupKwargs", "ParallelismConfig", "TorchDynamoPlugin", "TorchTensorParallelPlugin",
        "align_module_device", "broadcast_object_list", "check_device_map", "compute_module_sizes",
        "extract_model_from_parallel", "find_executable_batch_size", "fsdp2_prepare_model", "gather", "gather_object",
        "get_balanced_memory", "get_max_memory", "get_state_dict_offloaded_model",
        "infer_auto_device_map", "is_fp8_available", "is_mlu_available",
        "is_npu_available", "is_peft_model", "is_wandb_available", "is_xpu_available", "load_fsdp_model",
        "load_fsdp_optimizer", "load_offloaded_weights", "named_module_tensors", "offload_state_dict",
        "offload_weight", "patch_environment", "reduce", "release_memory", "save_fsdp_model", "save_fsdp_optimizer",
        "save_offload_index", "send_to_device", "set_module_tensor_to_device", "set_seed", "tqdm",
    ],
    "accelerate.utils.dataclasses": ["get_module_class_from_name"],
    "accelerate.utils.deepspeed": ["DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"],
    "accelerate.utils.fsdp_utils": ["fsdp2_prepare_auto_wrap_policy", "get_parameters_from_modules"],
    "accelerate.utils.imports": ["is_bf16_available", "is_xpu_available"],
    "accelerate.utils.launch": ["_convert_nargs_to_dict", "prepare_multi_gpu_env"],
    "accelerate.utils.memory": ["clear_device_cache"],
    "accelerate.utils.modeling": ["convert_file_size_to_int", "dtype_byte_size", "get_state_dict_offloaded_model"],
    "accelerate.utils.versions": ["is_torch_version"],
}  # fmt: skip


OF_DEEPSPEED = {"DeepSpeedPlugin", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in IMPORTS for name in IMPORTS[module]])
def test_names_that_libraries_import(module: str, name: str) -> None:
    """Each name that a library imports is there, or says which package has it."""
    mirror = importlib.import_module(module)
    if name in OF_DEEPSPEED and absent("deepspeed"):
        with pytest.raises(ImportError, match="pip install accel-deepspeed"):
            getattr(mirror, name)
    else:
        assert hasattr(mirror, name)


HOOKS = [
    ("AlignDevicesHook", {"execution_device": "cpu", "offload": True, "skip_keys": ["a"]}),
    ("CpuOffload", {"execution_device": torch.device("cpu")}),
    ("ModelHook", {}),
    ("LayerwiseCastingHook", {"storage_dtype": torch.float16, "compute_dtype": torch.float32, "non_blocking": False}),
]


@pytest.mark.parametrize(("name", "arguments"), HOOKS)
def test_hooks_can_be_rebuilt_from_their_attributes(name: str, arguments: dict[str, Any]) -> None:
    """A hook's attributes carry the names of its constructor's parameters, so that a copy can be built from them."""
    hook = getattr(accelerate.hooks, name)(**arguments)
    parameters = [one for one in inspect.signature(type(hook).__init__).parameters if one != "self"]
    parameters = [one for one in parameters if one not in ("args", "kwargs")]
    assert set(parameters) <= set(vars(hook)) | set(dir(hook))
    copied = getattr(accelerate.hooks, type(hook).__name__)(**{one: getattr(hook, one) for one in parameters})
    assert {one: getattr(copied, one) for one in parameters} == {one: getattr(hook, one) for one in parameters}


def test_hook_internals_of_an_offloaded_model(tmp_path: Path) -> None:
    """An offloaded module's hook shows where its weights lie and runs its halves when called by hand."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    device_map = {"0": "cpu", "1": "disk"}
    dispatched = accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    hook = dispatched[1]._hf_hook
    inner = hook.hooks[0] if isinstance(hook, accelerate.hooks.SequentialHook) else hook
    assert isinstance(inner, accelerate.hooks.AlignDevicesHook)
    assert inner.offload
    assert inner.execution_device is not None
    assert set(inner.original_devices) == {"weight", "bias"}
    assert inner.weights_map["weight"].shape == (2, 2)
    assert dispatched[1].weight.device.type == "meta"
    hook.pre_forward(dispatched[1], torch.zeros(1, 2))
    assert dispatched[1].weight.device.type == "cpu"
    hook.post_forward(dispatched[1], torch.zeros(1, 2))
    assert dispatched[1].weight.device.type == "meta"
    hook.io_same_device = True


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (accelerate.dispatch_model, ["offload_index", "skip_keys", "force_hooks"]),
        (accelerate.infer_auto_device_map, ["special_dtypes"]),
        (accelerate.utils.save_fsdp_model, ["adapter_only"]),
        (accelerate.utils.load_fsdp_optimizer, ["adapter_only"]),
        (Accelerator.gather_for_metrics, ["use_gather_object"]),
        (Accelerator.__init__, ["dataloader_config", "parallelism_config"]),
    ],
)
def test_signatures_that_libraries_probe(function: Any, parameters: list[str]) -> None:
    """Parameters that libraries look for before they pass them are there."""
    assert set(parameters) <= set(inspect.signature(function).parameters)


def test_attributes_that_the_trainer_uses(fresh_state: None) -> None:
    """The attributes, private ones included, that the transformers Trainer reads and writes are there."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    assert accelerator._models == [model]
    assert accelerator.state.fsdp_plugin is None
    assert accelerator.state.deepspeed_plugin is None
    accelerator.gradient_state.plugin_kwargs.update({"num_steps": 5})
    assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 5
    accelerator.gradient_state._set_sync_gradients(False)
    assert not accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(True)
    assert accelerator.step == 0
    assert accelerator.distributed_type is accelerator.state.distributed_type
    assert accelerator.optimizer_step_was_skipped is False
    accelerator.free_memory()
    assert accelerator._models == []


def test_singletons_can_be_reset(fresh_state: None) -> None:
    """The states can be asked whether they exist, and reset one by one or together."""
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    Accelerator(cpu=True)
    assert PartialState._shared_state != {}
    AcceleratorState()._reset_state()
    assert AcceleratorState._shared_state == {}
    assert PartialState._shared_state != {}
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


@pytest.mark.parametrize(
    ("variable", "value", "precision"),
    [("ACCELERATE_MIXED_PRECISION", "bf16", "bf16"), ("ACCELERATE_MIXED_PRECISION", "no", "no")],
)
def test_number_format_comes_from_the_environment(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, precision: str
) -> None:
    """The variable that libraries set for a launch decides the number format."""
    monkeypatch.setenv(variable, value)
    assert Accelerator(cpu=True).mixed_precision == precision


@pytest.mark.skipif(version_of("megatron-core") is not None, reason="megatron-core is installed")
def test_an_engine_without_its_library_is_refused(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for an engine by environment raises where package or library is missing; no run goes on without."""
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ImportError, match=r"accel-megatron is not installed|needs megatron-core"):
        Accelerator(cpu=True)


def test_device_comes_from_the_environment(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that name a device are honored."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert PartialState().device == torch.device("cpu")


@requires("engine:deepspeed")
def test_deepspeed_configuration_can_be_subclassed() -> None:
    """Transformers subclasses the configuration and adds to it."""

    class Ours(accelerate.utils.deepspeed.HfDeepSpeedConfig):
        def __init__(self, source: dict[str, Any]) -> None:
            super().__init__(source)
            self.mismatches: list[str] = []

    config = Ours({"zero_optimization": {"stage": 3}})
    assert config.is_zero3()
    assert accelerate.utils.DeepSpeedPlugin(hf_ds_config=config).hf_ds_config is config
