"""Questions about libraries and devices that Accelerate answers and accel itself does not ask."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host import environ
from accel_core.host.availability import (
    OLDEST_TORCHAO,
    USE_TORCH_XLA,
    has_library,
    has_module,
    is_cuda_available,
    is_hpu_available,
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
)
from accel_core.host.versions import compare_versions

__all__ = [
    "deepspeed_required",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_amdsmi_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_datasets_available",
    "is_dvclive_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_habana_gaudi1",
    "is_import_timer_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_numpy_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_torch_distributed_available",
    "is_torch_xla_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_tqdm_available",
    "is_trackio_available",
    "is_transformer_engine_mxfp8_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    "torchao_required",
]

_F = TypeVar("_F", bound=Callable[..., Any])


_OLDEST_STATEFUL_TORCHDATA = "0.8.0"  # the first that has the loader as it is used here


def _installed(module: str, *distributions: str) -> Callable[[], bool]:
    """Return a function that answers whether a library is installed."""

    def is_here() -> bool:
        return has_library(module, *distributions)

    return is_here


is_datasets_available = _installed("datasets")
is_peft_available = _installed("peft")
is_torchvision_available = _installed("torchvision")
is_torchdata_available = _installed("torchdata")
is_schedulefree_available = _installed("schedulefree")
is_lomo_available = _installed("lomo_optim", "lomo-optim")
is_wandb_available = _installed("wandb")
is_comet_ml_available = _installed("comet_ml", "comet-ml")
is_aim_available = _installed("aim")
is_clearml_available = _installed("clearml")
is_dvclive_available = _installed("dvclive")
is_swanlab_available = _installed("swanlab")
is_trackio_available = _installed("trackio")
is_boto3_available = _installed("boto3")
is_sagemaker_available = _installed("sagemaker")
is_tqdm_available = _installed("tqdm")
is_pandas_available = _installed("pandas")
is_matplotlib_available = _installed("matplotlib")
is_pytest_available = _installed("pytest")
is_import_timer_available = _installed("import_timer")


def _extension_drives(extension: str, device: str, check_device: bool) -> bool:
    """Return whether a torch extension is here and gives torch a device.

    `check_device` looks for one by using it, which sets the extension up in this process.
    """
    if not has_module(extension):
        return False
    importlib.import_module(extension)
    driver = getattr(importlib.import_module("torch"), device, None)  # the extension puts it there
    if driver is None:
        return False
    if not check_device:
        return bool(driver.is_available())
    try:
        return bool(driver.device_count()) and bool(driver.is_available())
    except RuntimeError:  # drivers say so that there is no device
        return False


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with its distributed part."""
    return bool(importlib.import_module("torch").distributed.is_available())


def is_rocm_available() -> bool:
    """Return whether torch was built for ROCm and finds a device."""
    # ROCm's devices go by the name cuda.
    return importlib.import_module("torch").version.hip is not None and is_cuda_available()


def is_xccl_available() -> bool:
    """Return whether torch was built with the XCCL backend."""
    return bool(importlib.import_module("torch.distributed.distributed_c10d").is_xccl_available())


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether an Intel XPU is here."""
    driver = importlib.import_module("torch").xpu
    return bool(driver.is_available()) and (not check_device or driver.device_count() > 0)


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether Apple's MPS is here."""
    backend = importlib.import_module("torch").backends.mps
    return compare_versions("torch", ">=", min_version) and bool(backend.is_available()) and bool(backend.is_built())


def is_mlu_available(check_device: bool = False) -> bool:
    """Return whether a Cambricon MLU is here, through torch_mlu."""
    return _extension_drives("torch_mlu", "mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Return whether a Moore Threads MUSA device is here, through torch_musa."""
    return _extension_drives("torch_musa", "musa", check_device)


def is_npu_available(check_device: bool = False) -> bool:
    """Return whether an Ascend NPU is here, through torch_npu."""
    return _extension_drives("torch_npu", "npu", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Return whether a Tecorigin SDAA device is here, through torch_sdaa."""
    return _extension_drives("torch_sdaa", "sdaa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Return whether an AWS Neuron device is here, through torch_neuronx."""
    return _extension_drives("torch_neuronx", "neuron", check_device)


def is_habana_gaudi1() -> bool:
    """Return whether the Gaudi is of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    habana: Any = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(habana._get_device_type() == habana.synDeviceType.synDeviceGaudi)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and not switched off by USE_TORCH_XLA.

    Raises:
        ConfigurationError: Both were asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise ConfigurationError(
            "One XLA device cannot be a TPU and a GPU; got check_is_tpu=True and check_is_gpu=True. Ask for one."
        )
    if not USE_TORCH_XLA or not has_module("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind in (("GPU", "CUDA") if check_is_gpu else ("TPU",))  # torch_xla has had both names for it


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device of this machine computes in bfloat16."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu  # every TPU computes in bfloat16
    if is_cuda_available():
        return bool(importlib.import_module("torch").cuda.is_bf16_supported())
    if is_mlu_available():
        return bool(importlib.import_module("torch").mlu.is_bf16_supported())
    if is_xpu_available():
        return bool(importlib.import_module("torch").xpu.is_bf16_supported())
    if is_mps_available():
        return bool(importlib.import_module("torch").backends.mps.is_macos_or_newer(14, 0))
    return True


def is_fp16_available() -> bool:
    """Return whether the device of this machine computes in float16; only the first Gaudi does not."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Return whether a library that trains in 8-bit floating point is here."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether Transformer Engine is here and the device computes in MXFP8."""
    if not has_library("transformer_engine", "transformer-engine", "transformer_engine"):
        return False
    return bool(importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_triton_available() -> bool:
    """Return whether Triton is installed, the one for Intel devices where those are."""
    # torch's wheels bring it by other names.
    return has_library("triton", "pytorch-triton-xpu", "triton-xpu", "triton", "pytorch-triton", "pytorch-triton-rocm")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed."""
    if not has_library("bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed in a version that packs weights in 4 bits."""
    return is_bnb_available(min_version="0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed in a version that packs weights in 8 bits."""
    return is_bnb_available(min_version="0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes is installed in a version that runs on more than CUDA."""
    if not is_bnb_available():
        return False
    library = importlib.import_module("bitsandbytes")
    return "multi_backend" in getattr(library, "features", set()) or is_bnb_available(min_version="0.46.0")


def is_pippy_available() -> bool:
    """Return whether torch has pipeline parallelism of its own (2.4 or later)."""
    return compare_versions("torch", ">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Return whether torch loads files without running code in them (2.4 or later)."""
    return compare_versions("torch", ">=", "2.4.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy is installed."""
    return has_library("numpy") and compare_versions("numpy", ">=", min_version)


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM is here: its training part, not the core library alone."""
    return has_module("megatron.training") or has_library("megatron", "megatron-lm")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata is installed in a version that has the StatefulDataLoader."""
    return is_torchdata_available() and compare_versions("torchdata", ">=", _OLDEST_STATEFUL_TORCHDATA)


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard or tensorboardX is installed."""
    return has_library("tensorboard") or has_library("tensorboardX")


def is_mlflow_available() -> bool:
    """Return whether MLflow is installed, whole or its small variant."""
    return has_library("mlflow", "mlflow", "mlflow-skinny")  # both bring the module


def is_rich_available() -> bool:
    """Return whether rich is installed and ACCELERATE_ENABLE_RICH asks for it."""
    # Only on demand, as rich takes over how errors are shown.
    return has_library("rich") and environ.flag("ACCELERATE_ENABLE_RICH")


def is_pynvml_available() -> bool:
    """Return whether NVIDIA's management library can be imported."""
    # NVIDIA's own distribution, and an older one of the same module.
    return has_library("pynvml", "nvidia-ml-py", "pynvml")


def is_amdsmi_available() -> bool:
    """Return whether AMD's management library is installed."""
    return has_library("amdsmi")


def torchao_required(func: _F) -> _F:
    """Make a function raise MissingDependencyError where torchao is not installed."""

    @functools.wraps(func)
    def guarded(*args: object, **kwargs: object) -> Any:
        if not is_torchao_available():
            raise MissingDependencyError(
                f"`{func.__name__}` needs torchao {OLDEST_TORCHAO} or later, which is not installed. "
                "Run `pip install torchao`."
            )
        return func(*args, **kwargs)

    return guarded  # type: ignore[return-value]


def deepspeed_required(func: _F) -> _F:
    """Make a function raise ConfigurationError where DeepSpeed is not the engine (ACCELERATE_USE_DEEPSPEED)."""

    @functools.wraps(func)
    def guarded(*args: object, **kwargs: object) -> Any:
        if not environ.flag("ACCELERATE_USE_DEEPSPEED"):
            raise ConfigurationError(
                f"`{func.__name__}` works under DeepSpeed, which is not enabled. "
                "Give the Accelerator a DeepSpeedPlugin, or launch with DeepSpeed."
            )
        return func(*args, **kwargs)

    return guarded  # type: ignore[return-value]
