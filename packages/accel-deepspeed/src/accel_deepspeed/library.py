"""The library DeepSpeed, imported when the first engine is made."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from accel_core.errors import ConfigurationError
from accel_core.host import environ

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ["as_local_rank", "destroy", "load"]


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


def destroy(engine: DeepSpeedEngine) -> None:
    """End an engine, and remove it from the list and the cache in which stage 3 keeps every model of the process."""
    engine.destroy()
    stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    coordinators = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(coordinators.PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
