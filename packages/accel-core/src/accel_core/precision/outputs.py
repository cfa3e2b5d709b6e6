"""Half-precision outputs given back in fp32, so that losses and metrics are computed in full precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from accel_core.comm.tree import recursively_apply

_HALF = (torch.float16, torch.bfloat16)


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
