"""Weights stored in a narrow dtype and computed in a wider one, layer by layer."""

import re
from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.hook import ModelHook, add_hook_to_module
from accel_bigmodel.placement import in_normal_mode

__all__ = ["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "LayerwiseCastingHook", "attach_layerwise_casting_hooks"]

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
