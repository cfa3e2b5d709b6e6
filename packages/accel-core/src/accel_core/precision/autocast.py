"""Half precision through torch's autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, TypeVar

import torch

from accel_core.comm.tree import recursively_apply
from accel_core.options.enums import PRECISIONS
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accel_core.precision.precision import Precision

_M = TypeVar("_M", bound=torch.nn.Module)
_HALF = (torch.float16, torch.bfloat16)


class AutocastPrecision(Precision):
    """Forward passes under `torch.autocast`, outputs given back in fp32; with fp16, a gradient scaler."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        handler: AutocastKwargs,
        scaler_handler: GradScalerKwargs,
        *,
        scale: bool = True,
    ) -> None:
        super().__init__(name, handler)
        self.native_amp = True
        self.device_type = device.type
        self.dtype: torch.dtype = getattr(torch, PRECISIONS[name].dtype)
        if name == "fp16" and scale:
            self.scaler = torch.amp.GradScaler(device.type, **scaler_handler.to_kwargs())

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return `torch.autocast` for the run's device and dtype; a null context once `native_amp` was switched off."""
        if not self.native_amp:
            return nullcontext()
        arguments = (handler or self.autocast_arguments).to_dict()
        return torch.autocast(self.device_type, dtype=self.dtype, **arguments)

    def wrap(self, model: _M) -> _M:
        """Run `model.forward` under autocast and give its half-precision outputs back in fp32."""
        if not self.native_amp or "_original_forward" in model.__dict__:
            return model
        original: Callable[..., Any] = model.forward
        # The function and not the method, which would run this model in a copy of it.
        function = original.__func__ if isinstance(original, MethodType) else original
        model.__dict__["_original_forward"] = original
        mixed = convert_outputs_to_fp32(self._under_autocast(function))
        model.forward = mixed if function is original else MethodType(mixed, model)
        return model

    def _under_autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        arguments = self.autocast_arguments.to_dict()
        device_type, dtype = self.device_type, self.dtype

        @functools.wraps(function)
        def forward(*args: object, **kwargs: object) -> object:
            with torch.autocast(device_type, dtype=dtype, **arguments):
                return function(*args, **kwargs)

        return forward


class Fp8Precision(AutocastPrecision):
    """8 bits through a library, bf16 everywhere else."""

    def __init__(self, device: torch.device, recipe: Any, handler: AutocastKwargs) -> None:
        super().__init__("fp8", device, handler, GradScalerKwargs())
        self.recipe = recipe


def _is_half(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def convert_to_fp32(tensor: object) -> Any:
    """Give every fp16 or bf16 tensor of a nest in fp32; everything else is the same object.

    Args:
        tensor: A tensor, or any nest of lists, tuples and mappings.

    Returns:
        The same nest with the converted tensors.

    Examples:
        >>> convert_to_fp32({"scores": torch.ones(2, dtype=torch.bfloat16), "name": "a"})
        {'scores': tensor([1., 1.]), 'name': 'a'}
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.float() if tensor.dtype in _HALF else tensor
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model_forward` with its half-precision outputs in fp32, as a plain function."""

    @functools.wraps(model_forward)
    def forward(*args: object, **kwargs: object) -> object:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward
