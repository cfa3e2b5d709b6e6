"""What the documentation of utilities and data classes says, on one process: a test for each."""

import dataclasses
import logging
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelerate
from accel_testing import requires
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    find_executable_batch_size,
    utils,
)
from accelerate.commands.config.default import write_basic_config
from accelerate.state import PartialState

CONSTANTS = {
    "MODEL_NAME": "pytorch_model",
    "OPTIMIZER_NAME": "optimizer",
    "RNG_STATE_NAME": "random_states",
    "SCALER_NAME": "scaler.pt",
    "SCHEDULER_NAME": "scheduler",
    "WEIGHTS_NAME": "pytorch_model.bin",
    "SAFE_WEIGHTS_NAME": "model.safetensors",
    "WEIGHTS_INDEX_NAME": "pytorch_model.bin.index.json",
    "SAFE_WEIGHTS_INDEX_NAME": "model.safetensors.index.json",
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_file_names(name: str) -> None:
    """Files of checkpoints and models have the documented names."""
    assert getattr(utils, name) == CONSTANTS[name]


ENUMERATIONS = {
    "ComputeEnvironment": ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"],
    "DistributedType": [
        "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NPU", "MULTI_XPU", "DEEPSPEED", "XLA",
    ],
    "DynamoBackend": [
        "NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT",
        "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM",
    ],
    "LoggerType": ["ALL", "TENSORBOARD", "WANDB", "COMETML", "DVCLIVE"],
    "PrecisionType": ["NO", "FP16", "BF16"],
    "RNGType": ["TORCH", "CUDA", "XLA", "GENERATOR"],
    "SageMakerDistributedType": ["NO", "DATA_PARALLEL", "MODEL_PARALLEL"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in ENUMERATIONS for value in ENUMERATIONS[name]])
def test_values_of_enumerations(name: str, value: str) -> None:
    """Each documented value is a member, found by its name and by its own value."""
    kind = getattr(utils, name)
    member = getattr(kind, value)
    assert kind(member.value) is member


def test_enumerations_compare_with_text() -> None:
    """A member equals its text, and a text can be asked for."""
    assert DistributedType.MULTI_CPU == "MULTI_CPU"
    assert "bf16" in utils.PrecisionType.list()
    assert "bf16" in utils.PrecisionType


HANDLERS: list[tuple[Any, dict[str, Any]]] = [
    (utils.AutocastKwargs, {"enabled": True, "cache_enabled": None}),
    (
        DistributedDataParallelKwargs,
        {
            "dim": 0, "broadcast_buffers": True, "bucket_cap_mb": 25, "find_unused_parameters": False,
            "check_reduction": False, "gradient_as_bucket_view": False, "static_graph": False, "comm_state_option": {},
        },
    ),
    (
        GradScalerKwargs,
        {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "enabled": True},
    ),
    (InitProcessGroupKwargs, {"backend": "nccl", "init_method": None}),
    (DataLoaderConfiguration, {
        "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": False,
        "non_blocking": False, "use_stateful_dataloader": False,
    }),
    (utils.ProjectConfiguration, {
        "project_dir": None, "logging_dir": None, "automatic_checkpoint_naming": False, "total_limit": None,
        "iteration": 0, "save_on_each_node": False,
    }),
    (utils.GradientAccumulationPlugin, {
        "num_steps": None, "adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False,
    }),
    (utils.TorchDynamoPlugin, {"fullgraph": False, "options": None, "disable": False}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "defaults"), HANDLERS, ids=[kind.__name__ for kind, _ in HANDLERS])
def test_defaults_of_data_classes(kind: Any, defaults: dict[str, Any]) -> None:
    """Each documented argument has the documented default."""
    made = kind()
    assert {name: getattr(made, name) for name in defaults} == defaults


@requires("torchao")
def test_torchao_filters_modules_itself() -> None:
    """Without a filter of the user's, torchao's recipe has none."""
    assert utils.AORecipeKwargs().module_filter_func is None


def test_arguments_that_differ_are_told() -> None:
    """`to_kwargs` has what was changed, and nothing else."""
    assert GradScalerKwargs(init_scale=2.0, growth_interval=7).to_kwargs() == {"init_scale": 2.0, "growth_interval": 7}
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {"timeout": timedelta(seconds=5)}
    assert DistributedDataParallelKwargs().to_kwargs() == {}


def test_handlers_reach_what_they_are_for(fresh_state: None) -> None:
    """The handler of each kind is the Accelerator's, and two of a kind are refused."""
    scaler = GradScalerKwargs(growth_interval=7)
    accelerator = Accelerator(kwargs_handlers=[scaler, DistributedDataParallelKwargs(static_graph=True)])
    assert accelerator.scaler_handler is scaler
    assert accelerator.ddp_handler.static_graph
    with pytest.raises(ValueError, match=r"GradScalerKwargs"):
        Accelerator(kwargs_handlers=[scaler, GradScalerKwargs()])


@requires("engine:deepspeed")
def test_deepspeed_plugin_fills_its_configuration() -> None:
    """Values that are "auto" are filled in, and a value that contradicts the configuration is an error."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
    }
    plugin = utils.DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.zero_stage == 2
    plugin.deepspeed_config_process(
        must_match=False, train_micro_batch_size_per_gpu=4, train_batch_size=8, gradient_clipping=1.0
    )
    assert plugin.deepspeed_config["train_batch_size"] == 8
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    with pytest.raises(ValueError, match=r"zero_optimization\.stage|stage"):
        plugin.deepspeed_config_process(**{"zero_optimization.stage": 3})


def test_fsdp_plugin_reads_words() -> None:
    """Strategy, prefetch and kind of state dict are given as words."""
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP", backward_prefetch="BACKWARD_PRE", state_dict_type="sharded_state_dict"
    )
    assert plugin.sharding_strategy.name == "SHARD_GRAD_OP"
    assert plugin.backward_prefetch.name == "BACKWARD_PRE"
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert plugin.limit_all_gathers


def test_fsdp_plugin_makes_a_wrap_policy() -> None:
    """The policy follows from the model and the class names that are wrapped."""
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    plugin.set_auto_wrap_policy(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    assert nn.Linear in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]


def test_fsdp_plugin_sets_the_precision() -> None:
    """The run's precision becomes FSDP's."""
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16


@requires("engine:megatron_lm")
def test_megatron_plugin_holds_its_degrees() -> None:
    """Degrees that are given stay; others have their defaults."""
    plugin = utils.MegatronLMPlugin(tp_degree=2, pp_degree=1, num_micro_batches=4)
    assert (plugin.tp_degree, plugin.num_micro_batches, plugin.eval_iters) == (2, 4, 100)


def test_dynamo_plugin_takes_a_backend_by_name() -> None:
    """The backend is given as a word or a member."""
    assert utils.TorchDynamoPlugin(backend="eager").backend is utils.DynamoBackend.EAGER
    assert "backend" in utils.TorchDynamoPlugin(backend="eager").to_kwargs()


def test_quantization_configuration() -> None:
    """Eight or four bits, with the documented defaults; both at once are refused."""
    config = utils.BnbQuantizationConfig(load_in_8bit=True)
    assert config.llm_int8_threshold == 6.0
    four = utils.BnbQuantizationConfig(load_in_4bit=True)
    assert four.bnb_4bit_quant_type == "fp4"
    assert four.bnb_4bit_compute_dtype is torch.float16
    with pytest.raises(ValueError, match=r"load_in_[48]bit"):
        utils.BnbQuantizationConfig(load_in_8bit=True, load_in_4bit=True)


def test_project_folders_can_be_set(tmp_path: Path) -> None:
    """The folder of logs is the project's, unless it is another."""
    project = utils.ProjectConfiguration(project_dir=str(tmp_path))
    assert project.logging_dir == str(tmp_path)
    project = utils.ProjectConfiguration()
    project.set_directories(str(tmp_path / "other"))
    assert project.project_dir == project.logging_dir == str(tmp_path / "other")


class Point(NamedTuple):
    """A nest with names."""

    x: Any
    y: Any


@dataclasses.dataclass
class Output:
    """A nest that is none of the builtin ones."""

    logits: Any


def test_concatenate_nests() -> None:
    """Tensors at the same place of each nest become one."""
    nests = [{"a": [torch.tensor([index])], "b": (torch.tensor([[index]]),)} for index in range(3)]
    found = utils.concatenate(nests)
    assert found["a"][0].tolist() == [0, 1, 2]
    assert found["b"][0].shape == (3, 1)
    assert utils.concatenate([torch.ones(1, 2), torch.zeros(1, 2)], dim=1).shape == (1, 4)


def test_convert_to_fp32() -> None:
    """Half precision becomes single; other dtypes stay."""
    data = {"a": torch.ones(1, dtype=torch.float16), "b": [torch.ones(1, dtype=torch.bfloat16), torch.ones(1).long()]}
    found = utils.convert_to_fp32(data)
    assert [found["a"].dtype, found["b"][0].dtype, found["b"][1].dtype] == [torch.float32, torch.float32, torch.int64]


@pytest.mark.parametrize("name", ["gather", "broadcast", "reduce", "pad_across_processes"])
def test_operations_on_one_process_give_what_they_got(name: str, fresh_state: None) -> None:
    """A nest of tensors of one process comes back as it is."""
    PartialState(cpu=True)
    found = getattr(utils, name)(Point({"a": torch.ones(2)}, [torch.zeros(1)]))
    assert isinstance(found, Point)
    assert found.x["a"].tolist() == [1, 1]
    assert found.y[0].tolist() == [0]


def test_objects_on_one_process(fresh_state: None) -> None:
    """Objects of one process come back as they are."""
    PartialState(cpu=True)
    assert utils.gather_object(["a", 1]) == ["a", 1]
    assert utils.broadcast_object_list(["a", {"b": 1}]) == ["a", {"b": 1}]


def test_listify() -> None:
    """Tensors become lists of numbers, wherever they are."""
    assert utils.listify({"a": torch.tensor([1, 2]), "b": [torch.tensor(3.0)]}) == {"a": [1, 2], "b": [3.0]}


def test_recursively_apply() -> None:
    """A function is applied to every tensor, or to what another test chooses; other types stay or are an error."""
    data = {"a": torch.ones(1), "b": Point(torch.ones(1), "word")}
    found = utils.recursively_apply(lambda tensor, amount: tensor * amount, data, 3)
    assert found["a"].item() == found["b"].x.item() == 3
    assert found["b"].y == "word"
    with pytest.raises(TypeError, match=r"str"):
        utils.recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    words = utils.recursively_apply(str.upper, ["a", 1], test_type=lambda item: isinstance(item, str))
    assert words == ["A", 1]


def test_send_to_device() -> None:
    """Tensors go to the device, keys that are skipped stay."""
    data = {"a": torch.ones(1), "b": [torch.ones(1)], "c": torch.ones(1), "d": "word"}
    found = utils.send_to_device(data, "meta", non_blocking=True, skip_keys=["c"])
    assert [found["a"].device.type, found["b"][0].device.type, found["c"].device.type] == ["meta", "meta", "cpu"]
    assert found["d"] == "word"


def test_slice_tensors() -> None:
    """The same slice is taken of every tensor."""
    found = utils.slice_tensors({"a": torch.arange(4), "b": [torch.arange(8).reshape(4, 2)]}, slice(1, 3))
    assert found["a"].tolist() == [1, 2]
    assert found["b"][0].shape == (2, 2)


@pytest.mark.parametrize(
    "name", ["is_bf16_available", "is_mps_available", "is_npu_available", "is_torch_xla_available", "is_xpu_available"]
)
def test_environment_checks_answer(name: str) -> None:
    """Every question has a yes or no; a CPU computes in bf16 and is no other device."""
    assert getattr(utils, name)() is (name == "is_bf16_available")


def test_torch_version_is_compared() -> None:
    """The installed torch is compared with any other version."""
    assert utils.is_torch_version(">=", "1.12")
    assert not utils.is_torch_version("<", "1.12")
    with pytest.raises(ValueError, match=r"~"):
        utils.is_torch_version("~", "1.12")


def test_environment_is_patched_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are written in upper case and values as text; afterwards all is as it was."""
    monkeypatch.setenv("SURELY_KEPT", "kept")
    with utils.patch_environment(surely_new=1, surely_kept="changed"):
        assert (os.environ["SURELY_NEW"], os.environ["SURELY_KEPT"]) == ("1", "changed")
    assert "SURELY_NEW" not in os.environ
    assert os.environ["SURELY_KEPT"] == "kept"


def test_environment_is_cleared_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the block nothing is set, and what is set there is gone after it."""
    monkeypatch.setenv("SURELY_KEPT", "kept")
    with utils.clear_environment():
        assert not os.environ
        os.environ["SURELY_NEW"] = "1"
    assert "SURELY_NEW" not in os.environ
    assert os.environ["SURELY_KEPT"] == "kept"


@pytest.mark.parametrize("mixed_precision", ["no", "fp16", "bf16"])
def test_basic_configuration_is_written(mixed_precision: str, tmp_path: Path) -> None:
    """A file for this machine is written where there is none, and left alone where there is one."""
    path = tmp_path / "default_config.yaml"
    assert write_basic_config(mixed_precision=mixed_precision, save_location=str(path)) == path
    text = path.read_text()
    assert f"mixed_precision: '{mixed_precision}'" in text or f"mixed_precision: {mixed_precision}" in text
    assert write_basic_config(save_location=str(path)) is False
    assert path.read_text() == text


def test_affinity_without_gpus_is_left(fresh_state: None) -> None:
    """On a machine without NVIDIA GPUs the process stays on its processors."""
    before = os.sched_getaffinity(0)
    utils.set_numa_affinity(0, verbose=False)
    utils.environment.override_numa_affinity(0, verbose=False)
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_batch_size_is_halved_until_it_fits() -> None:
    """Errors of memory halve the batch size; the function's other arguments are passed on."""
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int, word: str, *, end: int) -> str:
        tried.append(batch_size)
        if batch_size > end:
            raise RuntimeError("CUDA out of memory.")
        return f"{word} {batch_size}"

    assert train("ran with", end=6).startswith("ran with ")
    assert tried[0] == 8
    assert tried == sorted(tried, reverse=True)
    with pytest.raises(TypeError, match=r"batch_size"):
        train(8, "word", end=1)


@pytest.mark.slow
def test_other_errors_are_not_caught() -> None:
    """An error that is none of memory comes out."""

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match=r"mine"):
        train()


def test_models_come_out_of_containers() -> None:
    """Containers are taken off, at the top or everywhere."""
    inner = nn.Linear(1, 1)
    assert utils.extract_model_from_parallel(nn.DataParallel(inner)) is inner
    outer = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    assert isinstance(utils.extract_model_from_parallel(outer, recursive=True)[0], nn.Linear)


@pytest.mark.parametrize("safe_serialization", [False, True])
def test_data_is_saved(tmp_path: Path, safe_serialization: bool, fresh_state: None) -> None:
    """The file is torch's, or safetensors."""
    utils.save({"a": torch.ones(1)}, tmp_path / "file", safe_serialization=safe_serialization)
    if safe_serialization:
        from safetensors.torch import load_file

        assert load_file(tmp_path / "file")["a"].item() == 1
    else:
        assert torch.load(tmp_path / "file")["a"].item() == 1


def test_waiting_before_any_state(fresh_state: None) -> None:
    """One process goes on at once."""
    utils.wait_for_everyone()


def test_seed_sets_every_generator(fresh_state: None) -> None:
    """Python, NumPy and torch draw the same after the same seed."""
    import numpy

    def draw() -> tuple[float, float, float]:
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    utils.set_seed(42)
    first = draw()
    utils.set_seed(42)
    assert draw() == first
    utils.set_seed(42, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["torch", utils.RNGType.GENERATOR])
def test_random_states_on_one_process_stay(kind: Any, fresh_state: None) -> None:
    """With nobody to agree with, generators go on where they are."""
    PartialState(cpu=True)
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    utils.synchronize_rng_state(kind, generator=generator)
    assert torch.rand(1, generator=generator).item() == torch.rand(1).item()


def test_xla_is_installed_in_colab_only() -> None:
    """Elsewhere the helper refuses, and installs nothing."""
    with pytest.raises(RuntimeError, match=r"(?i)colab"):
        utils.install_xla()


@requires("bitsandbytes")
def test_quantized_model_has_packed_layers() -> None:
    """Linear layers become bitsandbytes' own."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = utils.BnbQuantizationConfig(load_in_8bit=True, skip_modules=["1"])
    packed = utils.load_and_quantize_model(model, config)
    assert type(packed[0]).__name__ == "Linear8bitLt"
    assert type(packed[1]) is nn.Linear


def test_logger_speaks_on_the_main_process(caplog: pytest.LogCaptureFixture, fresh_state: None) -> None:
    """A logger of accelerate writes once a message, with the levels of logging."""
    PartialState(cpu=True)
    logger = accelerate.logging.get_logger("surely.mine")
    with caplog.at_level(logging.INFO, "surely.mine"):
        logger.info("told", main_process_only=True)
        logger.warning_once("once")
        logger.warning_once("once")
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["told", "once"]


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False)])
def test_debug_mode_is_read_from_the_environment(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    """ACCELERATE_DEBUG_MODE switches the checks of operations on."""
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", value)
    assert PartialState(cpu=True).debug is expected
