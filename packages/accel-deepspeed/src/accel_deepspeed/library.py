"""The library DeepSpeed, imported when the first engine is made."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from accel_core.errors import ConfigurationError
from accel_core.host import environ

__all__ = ["as_local_rank", "load"]


def load(device: torch.device, local_rank: int) -> ModuleType:
    """Import DeepSpeed for the device of this process."""
    if environ.text("LOCAL_RANK") is None:
        environ.write("LOCAL_RANK", local_rank)
    if device.type == "cpu" and environ.text("DS_ACCELERATOR") is None:
        environ.write("DS_ACCELERATOR", "cpu")
    library = importlib.import_module("deepspeed")
    found: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    name = str(found.device_name()).partition(":")[0]
    if name != device.type:
        raise ConfigurationError(
            f"DeepSpeed has to use the device of the run; got {name} for a run on {device.type}. Set "
            f"DS_ACCELERATOR={device.type} before anything imports deepspeed."
        )
    return library


def as_local_rank(device: torch.device) -> AbstractContextManager[None]:
    """Let DeepSpeed find this device, as it takes LOCAL_RANK for its number; processes may see a GPU each."""
    return nullcontext() if device.index is None else environ.patch_environment(local_rank=device.index)
