"""A model that waits on the CPU and moves to the device as a whole to run."""

from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.align import move_to
from accel_bigmodel.hooks.hook import ModelHook, remove_hook_from_module
from accel_bigmodel.placement import as_device, in_normal_mode, normal_tensors
from accel_core.devices.memory import clear_device_cache

__all__ = ["CpuOffload", "UserCpuOffloadHook"]


class CpuOffload(ModelHook):
    """Brings a whole model to the device when it runs, and leaves it there.

    Args:
        execution_device: Where it runs; by default the accelerator, or the CPU when there is none.
        prev_module_hook: The hook of the model that runs before; it is offloaded when this one runs.

    Examples:
        >>> from accel import add_hook_to_module
        >>> model = add_hook_to_module(model, CpuOffload(execution_device=accelerator.device))
    """

    moves_weights = True

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        prev_module_hook: "UserCpuOffloadHook | None" = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None:
            found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            execution_device = torch.device("cpu") if found is None else as_device(found)
        self.execution_device = execution_device

    @in_normal_mode
    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the model before, and bring this one and its inputs to the device."""
        device = as_device(self.execution_device)
        if self.prev_module_hook is not None and isinstance(self.prev_module_hook, UserCpuOffloadHook):
            previous = self.prev_module_hook.model
            first = next(previous.parameters(), None)
            if first is None or first.device == device:
                self.prev_module_hook.offload()
                clear_device_cache()
        first = next(module.parameters(), None)
        if first is None or first.device != device:
            with normal_tensors():  # the model stays on the device after the call
                module.to(device)
        return move_to(args, device), move_to(kwargs, device)


class UserCpuOffloadHook:
    """The user's handle of a `CpuOffload`.

    Args:
        model: The model.
        hook: Its hook.

    Examples:
        >>> from accel import cpu_offload_with_hook
        >>> model, hook = cpu_offload_with_hook(model)
        >>> scores = model(torch.rand(2, 64))
        >>> hook.offload()  # back to the CPU
        >>> hook.remove()
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model to the CPU again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model."""
        remove_hook_from_module(self.model)
