"""Markers for tests: what a test needs, so that it is skipped where that is missing."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from accel_core.errors import ConfigurationError
from accel_core.host.availability import (
    is_cuda_available,
    is_deepspeed_available,
    is_timm_available,
    is_torchao_available,
    is_transformer_engine_available,
    is_transformers_available,
)
from accel_core.host.environ import flag
from accel_core.host.versions import compare_versions, is_torch_version
from accel_parallel.options import FSDP2_PYTORCH_VERSION
from accelerate import _availability as here
from accelerate._constants import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
from accelerate._machine import check_cuda_fp8_capability
from accelerate._test_backend import get_backend

__all__ = [
    "require_aim",
    "require_bnb",
    "require_clearml",
    "require_comet_ml",
    "require_cpu",
    "require_cuda",
    "require_cuda_or_hpu",
    "require_cuda_or_xpu",
    "require_datasets",
    "require_deepspeed",
    "require_dvclive",
    "require_fp8",
    "require_fp16",
    "require_fsdp2",
    "require_huggingface_suite",
    "require_import_timer",
    "require_matplotlib",
    "require_mlflow",
    "require_mlu",
    "require_mps",
    "require_multi_device",
    "require_multi_gpu",
    "require_multi_gpu_or_xpu",
    "require_multi_xpu",
    "require_musa",
    "require_neuron",
    "require_non_cpu",
    "require_non_hpu",
    "require_non_torch_xla",
    "require_non_xpu",
    "require_npu",
    "require_pandas",
    "require_peft",
    "require_pippy",
    "require_schedulefree",
    "require_sdaa",
    "require_single_device",
    "require_single_gpu",
    "require_single_xpu",
    "require_swanlab",
    "require_tensorboard",
    "require_timm",
    "require_torch_min_version",
    "require_torchao",
    "require_torchdata_stateful_dataloader",
    "require_torchvision",
    "require_tp",
    "require_tpu",
    "require_trackers",
    "require_trackio",
    "require_transformer_engine",
    "require_transformer_engine_mxfp8",
    "require_transformers",
    "require_triton",
    "require_wandb",
    "require_xpu",
    "run_first",
    "skip",
    "slow",
]

_T = TypeVar("_T")
Marker = Callable[[_T], _T]


def skip(test_case: _T) -> _T:
    """Skip a test."""
    return unittest.skip("Test was skipped")(test_case)  # type: ignore[type-var]


def slow(test_case: _T) -> _T:
    """Skip a test unless RUN_SLOW says yes."""
    return unittest.skipUnless(flag("RUN_SLOW"), "test is slow")(test_case)  # type: ignore[type-var]


def run_first(test_case: _T) -> _T:
    """Let pytest-order, where it is installed, run a test before all others."""
    if not here.is_pytest_available():
        return test_case
    import pytest  # suites of unittest need none

    marked: _T = pytest.mark.order(1)(test_case)  # type: ignore[assignment]
    return marked


def _needs(what: str, holds: Callable[[], bool]) -> Marker[Any]:
    """Make a marker that skips a test or a class of tests."""

    def require(test_case: _T) -> _T:
        # Asked where a marker is used: asking at import would set up devices.
        return unittest.skipUnless(holds(), f"test requires {what}")(test_case)  # type: ignore[type-var]

    return require


def _device(*names: str, least: int = 1, most: float = float("inf")) -> bool:
    """Return whether the device of this machine is one of `names`, and how many there are of it is in the range."""
    name, count, _ = get_backend()
    return name in names and least <= count <= most


def _accelerators(least: int, most: float) -> bool:
    name, count, _ = get_backend()
    return name != "cpu" and least <= count <= most


def _computes_in_fp8() -> bool:
    return here.is_fp8_available() and (not is_cuda_available() or check_cuda_fp8_capability())


def _splits_tensors() -> bool:
    return is_transformers_available() and compare_versions(
        "transformers", ">=", BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
    )


def _has_trackers() -> bool:
    found = (here.is_wandb_available, here.is_tensorboard_available, here.is_trackio_available)
    return any(is_here() for is_here in found) and not here.is_comet_ml_available()


require_cpu = _needs("a machine without an accelerator", lambda: _device("cpu"))
require_non_cpu = _needs("an accelerator", lambda: not _device("cpu"))
require_cuda = _needs("a GPU", lambda: _device("cuda"))
require_cuda_or_hpu = _needs("a GPU or HPU", lambda: _device("cuda", "hpu"))
require_cuda_or_xpu = _needs("a GPU or XPU", lambda: _device("cuda", "xpu"))
require_xpu = _needs("an XPU", lambda: _device("xpu"))
require_non_xpu = _needs("a machine without XPU", lambda: not _device("xpu"))
require_non_hpu = _needs("a machine without HPU", lambda: not _device("hpu"))
require_mlu = _needs("an MLU", lambda: _device("mlu"))
require_sdaa = _needs("an SDAA", lambda: _device("sdaa"))
require_musa = _needs("a MUSA", lambda: _device("musa"))
require_npu = _needs("an NPU", lambda: _device("npu"))
require_neuron = _needs("Neuron cores", lambda: _device("neuron"))
require_mps = _needs("MPS", here.is_mps_available)
require_tpu = _needs("a TPU", partial(here.is_torch_xla_available, check_is_tpu=True))
require_non_torch_xla = _needs("an environment without torch_xla", lambda: not here.is_torch_xla_available())
require_single_device = _needs("one accelerator", lambda: _accelerators(1, 1))
require_single_gpu = _needs("one GPU", lambda: _device("cuda", most=1))
require_single_xpu = _needs("one XPU", lambda: _device("xpu", most=1))
require_multi_device = _needs("several accelerators", lambda: _accelerators(2, float("inf")))
require_multi_gpu = _needs("several GPUs", lambda: _device("cuda", least=2))
require_multi_xpu = _needs("several XPUs", lambda: _device("xpu", least=2))
require_multi_gpu_or_xpu = _needs("several GPUs or XPUs", lambda: _device("cuda", "xpu", least=2))
require_fp16 = _needs("a device that computes in fp16", here.is_fp16_available)
require_fp8 = _needs("a library and a device that compute in fp8", _computes_in_fp8)
require_fsdp2 = _needs("FSDP2", lambda: is_torch_version(">=", FSDP2_PYTORCH_VERSION))
require_tp = _needs("torch and transformers for tensor parallel", _splits_tensors)
require_pippy = _needs("pipeline parallel of torch", here.is_pippy_available)
require_bnb = _needs("bitsandbytes", here.is_bnb_available)
require_torchao = _needs("torchao", is_torchao_available)
require_transformer_engine = _needs("Transformer Engine", is_transformer_engine_available)
require_transformer_engine_mxfp8 = _needs("Transformer Engine with MXFP8", here.is_transformer_engine_mxfp8_available)
require_deepspeed = _needs("DeepSpeed", is_deepspeed_available)
require_transformers = _needs("transformers", is_transformers_available)
require_datasets = _needs("datasets", here.is_datasets_available)
require_huggingface_suite = _needs(
    "transformers and datasets", lambda: is_transformers_available() and here.is_datasets_available()
)
require_peft = _needs("peft", here.is_peft_available)
require_timm = _needs("timm", is_timm_available)
require_torchvision = _needs("torchvision", here.is_torchvision_available)
require_torchdata_stateful_dataloader = _needs(
    "torchdata's StatefulDataLoader", here.is_torchdata_stateful_dataloader_available
)
require_schedulefree = _needs("schedulefree", here.is_schedulefree_available)
require_triton = _needs("triton", here.is_triton_available)
require_import_timer = _needs("import_timer", here.is_import_timer_available)
require_pandas = _needs("pandas", here.is_pandas_available)
require_matplotlib = _needs("matplotlib", here.is_matplotlib_available)
require_aim = _needs("aim", here.is_aim_available)
require_clearml = _needs("clearml", here.is_clearml_available)
require_comet_ml = _needs("comet_ml", here.is_comet_ml_available)
require_dvclive = _needs("dvclive", here.is_dvclive_available)
require_mlflow = _needs("mlflow", here.is_mlflow_available)
require_swanlab = _needs("swanlab", here.is_swanlab_available)
require_tensorboard = _needs("TensorBoard", here.is_tensorboard_available)
require_trackio = _needs("trackio", here.is_trackio_available)
require_wandb = _needs("wandb", here.is_wandb_available)
require_trackers = _needs("a tracker that works without a network, and no comet_ml", _has_trackers)


def require_torch_min_version(test_case: object = None, version: str | None = None) -> object:
    """Skip a test where torch is older than a version; without a test, return the marker for that version.

    Raises:
        ConfigurationError: A test and no version.
    """
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    if version is None:
        raise ConfigurationError("A marker for a version needs one; got version=None. Pass version='2.6'.")
    return _needs(f"torch {version}", lambda: is_torch_version(">=", version))(test_case)
