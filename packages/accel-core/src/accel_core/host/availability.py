"""What is installed, and what the hardware can do.

Whether a library is here is answered from its metadata; nothing is imported for it. torch, and the libraries that
drive a kind of device, are imported only by the questions about devices.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

from accel_core.host import environ
from accel_core.host.installed import version_of
from accel_core.host.versions import compare_versions

USE_TORCH_XLA = environ.flag("USE_TORCH_XLA", True)
"""Whether torch_xla is used where it is installed; read from USE_TORCH_XLA when this module is imported."""

OLDEST_TORCHAO = "0.6.1"
"""The first torchao that trains in fp8 as a run asks for it."""


def has_library(module: str, *distributions: str) -> bool:
    """Return whether a module can be imported and belongs to an installed distribution."""
    return has_module(module) and any(version_of(name) is not None for name in distributions or (module,))


def _torch() -> ModuleType:
    return importlib.import_module("torch")


def has_module(name: str) -> bool:
    """Return whether a module without distribution metadata of a known name can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the package above it is not installed, or has no spec
        return False


def imported(path: str) -> Any:
    """Return what `module:name` names, or `None` where nobody has imported the module."""
    module, _, name = path.partition(":")
    return getattr(sys.modules.get(module), name, None)


def is_cuda_available() -> bool:
    """Return whether CUDA or ROCm is here, without setting it up, so that processes can still be forked."""
    with environ.patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return bool(_torch().cuda.is_available())


@cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether an Intel Gaudi is here, through habana_frameworks."""
    if not (has_module("habana_frameworks") and has_module("habana_frameworks.torch")):
        return False
    importlib.import_module("habana_frameworks.torch")
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return hasattr(_torch(), "hpu") and bool(_torch().hpu.is_available())


def is_transformer_engine_available() -> bool:
    """Return whether Transformer Engine is installed, or its counterpart for Gaudi."""
    if is_hpu_available():
        return has_module("intel_transformer_engine") or has_module("habana_frameworks.torch.hpex.experimental")
    return has_library("transformer_engine", "transformer-engine", "transformer_engine")


def is_msamp_available() -> bool:
    """Return whether MS-AMP is installed."""
    return has_library("msamp", "ms-amp")


def is_torchao_available() -> bool:
    """Return whether torchao 0.6.1 or later is installed."""
    return has_library("torchao") and compare_versions("torchao", ">=", OLDEST_TORCHAO)


def is_deepspeed_available() -> bool:
    """Return whether DeepSpeed is installed."""
    return has_library("deepspeed")


def is_transformers_available() -> bool:
    """Return whether transformers is installed."""
    return has_library("transformers")


def is_timm_available() -> bool:
    """Return whether timm is installed."""
    return has_library("timm")
