"""The library DeepSpeed, imported when the first engine is made."""

from __future__ import annotations

import functools
import importlib
import logging
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from accel_core.host import environ

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_logger = logging.getLogger(__name__)


def load(device: torch.device, local_rank: int) -> ModuleType:
    """Import DeepSpeed for the device of this process."""
    if environ.text("LOCAL_RANK") is None:
        environ.write("LOCAL_RANK", local_rank)
    if device.type == "cpu" and environ.text("DS_ACCELERATOR") is None:
        environ.write("DS_ACCELERATOR", "cpu")
    library = importlib.import_module("deepspeed")
    if local_rank == 0:
        wait_for_locks()
    return library


@functools.cache
def wait_for_locks(limit: float = 30) -> None:
    """Wait until nobody compiles operators on this machine; name locks that stay, as DeepSpeed waits for them forever.

    A process that was killed while it compiled leaves one, in the cache of torch's extensions.
    """
    default = importlib.import_module("torch.utils.cpp_extension").get_default_build_root()
    end, locks = time.monotonic() + limit, list(Path(environ.text("TORCH_EXTENSIONS_DIR") or default).rglob("lock"))
    while locks := [lock for lock in locks if lock.exists()]:
        if time.monotonic() > end:
            _logger.warning(
                "DeepSpeed waits while another process compiles an operator; got %s for %g s. If no process does, "
                "delete this file.",
                *(", ".join(map(str, locks)), limit),
            )
            return
        time.sleep(0.1)


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
