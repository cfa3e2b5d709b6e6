"""Modules that compute in 32 bits inside of a model that computes in half precision."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from accel_core.comm.tree import recursively_apply, tree_leaves
from accel_core.precision.autocast import convert_to_fp32


def compute_exactly(module: nn.Module, device: str, rest: torch.dtype | None) -> None:
    """Let a module compute in 32 bits, and give its output back in the format of its input, or else of the rest."""
    forward = module.forward

    @functools.wraps(forward)
    def exact(*args: Any, **kwargs: Any) -> object:
        args, kwargs = convert_to_fp32((args, kwargs))
        with torch.autocast(device, enabled=False):
            return forward(*args, **kwargs)

    module.forward = exact
    module.register_forward_hook(functools.partial(_give_back, rest), with_kwargs=True)


# By a hook, so that those of users see what the module computed.
def _give_back(rest: torch.dtype | None, module: nn.Module, args: object, kwargs: object, output: object) -> object:
    given = next((leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_floating(leaf)), rest)
    return recursively_apply(torch.Tensor.to, output, given, test_type=_is_floating)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
