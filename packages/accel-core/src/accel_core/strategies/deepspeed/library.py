"""The library DeepSpeed: found before a run starts, imported when the first engine is made."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host import availability, environ, versions

__all__ = ["load", "require"]

_OLDEST = "0.18.2"


def require() -> None:
    """Refuse a run with DeepSpeed where it is not installed, without importing it.

    Raises:
        MissingDependencyError: It is not installed, or is too old.
    """
    if not availability.is_deepspeed_available():
        raise MissingDependencyError(
            "This run asks for DeepSpeed, which has to be installed; got no library of that name. "
            "Run `pip install deepspeed ninja`."
        )
    if versions.compare_versions("deepspeed", "<", _OLDEST):
        found = versions.installed_version("deepspeed")
        raise MissingDependencyError(
            f"Gradients are accumulated by DeepSpeed {_OLDEST} or newer; got {found}. Run `pip install -U deepspeed`."
        )


def load(device: torch.device, local_rank: int) -> ModuleType:
    """Import DeepSpeed for the device of this process.

    Args:
        device: Where the process computes.
        local_rank: Its number on this machine, which DeepSpeed reads from LOCAL_RANK.

    Raises:
        ConfigurationError: DeepSpeed was imported before and computes elsewhere.
    """
    if environ.text("LOCAL_RANK") is None:
        environ.write("LOCAL_RANK", local_rank)
    if device.type == "cpu" and environ.text("DS_ACCELERATOR") is None:
        environ.write("DS_ACCELERATOR", "cpu")
    library = importlib.import_module("deepspeed")
    found: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    name = str(found.device_name()).partition(":")[0]
    if name != device.type:
        raise ConfigurationError(
            f"DeepSpeed computes where the run does; got {name} for a run on {device.type}. "
            f"Set DS_ACCELERATOR={device.type} before anything imports deepspeed."
        )
    return library
