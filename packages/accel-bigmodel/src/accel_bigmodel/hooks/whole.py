"""Hooks that move or cast a whole module for its forward."""

import re
from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.align import move_to
from accel_bigmodel.hooks.hook import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_bigmodel.placement import as_device, in_normal_mode, normal_tensors
from accel_core.devices.memory import clear_device_cache

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Casts a layer to its compute dtype for a forward, and back to its storage dtype after it."""

    moves_weights = True

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    @in_normal_mode
    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the layer to its storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @in_normal_mode
    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the layer to its compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @in_normal_mode
    def post_forward(self, module: nn.Module, output: object) -> Any:
        """Cast the layer back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output

    @in_normal_mode
    def abort_forward(self, module: nn.Module) -> None:
        """Cast the layer back after a forward that raised."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the linear and convolution layers of a model in a narrow dtype, such as `torch.float8_e4m3fn`.

    Modules of the classes to skip, modules whose name matches one of the regular expressions, and everything below them
    are left alone.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else (skip_modules_pattern or ())
    stack = [("", module)]
    while stack:
        name, layer = stack.pop()
        if isinstance(layer, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(layer, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            continue
        stack.extend((f"{name}.{key}" if name else key, child) for key, child in layer.named_children())


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
