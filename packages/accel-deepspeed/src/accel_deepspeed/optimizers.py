"""DeepSpeed's CPU versions of torch's optimizers, for optimizer states in host memory."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

from accel_core.errors import PreparationError
from accel_deepspeed.plugin import DeepSpeedPlugin, DummyOptim

_logger = logging.getLogger(__name__)

_CPU_VERSIONS = {
    torch.optim.AdamW: ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    torch.optim.Adam: ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    torch.optim.Adagrad: ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
}


def for_the_host(optimizer: object, plugin: DeepSpeedPlugin, *, dry_run: bool = False) -> Any:
    """Return DeepSpeed's CPU version of an optimizer if its state is offloaded, or else the optimizer itself."""
    config = plugin.hf_ds_config
    place = config.get_value("zero_optimization.offload_optimizer.device", "none")
    forced = config.get_value("zero_force_ds_cpu_optimizer", True)  # DeepSpeed's own default
    is_own = type(optimizer).__module__.startswith("deepspeed.")
    if isinstance(optimizer, DummyOptim) or place in (None, "none") or not forced or is_own:
        return optimizer
    if type(optimizer) not in _CPU_VERSIONS:
        raise PreparationError(
            "DeepSpeed has CPU versions of Adam, AdamW and Adagrad for offloaded state; got "
            f"{type(optimizer).__name__}. Use one of these of torch.optim, or set zero_force_ds_cpu_optimizer to "
            "false in the configuration."
        )
    return optimizer if dry_run else map_pytorch_optim_to_deepspeed(optimizer)


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """Return DeepSpeed's CPU version of a torch optimizer; any other optimizer is returned unchanged.

    The first process that needs it compiles its code into torch's extension cache, which takes about a minute.
    """
    found = _CPU_VERSIONS.get(type(optimizer))
    if found is None:
        return optimizer
    kind = getattr(importlib.import_module(found[0]), found[1])
    arguments: dict[str, Any] = {name: optimizer.defaults[name] for name in ("lr", "eps", "weight_decay")}
    if found[1] == "DeepSpeedCPUAdam":
        arguments |= {"betas": optimizer.defaults["betas"], "adamw_mode": isinstance(optimizer, torch.optim.AdamW)}
    _logger.info("Building %s, unless the cache of torch's extensions has it.", found[1])
    made = kind(optimizer.param_groups, **arguments)
    for own, given in zip(made.param_groups, optimizer.param_groups, strict=True):
        # Schedules set it.
        own.update({key: value for key, value in given.items() if key in own or key == "initial_lr"})
    return made
