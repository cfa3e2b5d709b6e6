"""Half precision for programs that wrap forwards themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel_core.plugins.handlers import AutocastKwargs
from accel_core.precision.autocast import convert_to_fp32
from accel_core.precision.fp8.torchao import filter_linear_layers, find_first_last_linear_layers
from accel_core.state.run import AcceleratorState

# What fp8 layers leave is computed in bf16.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[object]:
    """Return a context that computes in the precision of this process's run."""
    state = AcceleratorState()
    dtype = _DTYPES.get(state.mixed_precision)
    if not native_amp or dtype is None:
        return nullcontext()
    return torch.autocast(state.device.type, dtype=dtype, **(autocast_kwargs or AutocastKwargs()).to_dict())


class ConvertOutputsToFp32:
    """A forward whose half-precision outputs come back in fp32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)  # signatures are read off forwards

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the forward."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """Return whether a layer is to be converted when the first and last linear layers below `module` are not."""
    return filter_linear_layers(
        module, fqn, layers_to_filter=[name for name in find_first_last_linear_layers(module) if name is not None]
    )
