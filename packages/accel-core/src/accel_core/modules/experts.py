"""Modules that hold the experts of a mixture as stacked parameters, as transformers' models do."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["is_experts", "standing_in"]

_INPUTS = 3
"""Tokens, for each of them the numbers of its experts, and for each of those a weight."""


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a set of experts.

    It says how many there are in `num_experts`, which is the first size of each parameter of its own, and is called
    with tokens (tokens, width), the numbers of each token's experts and their weights (tokens, choices).
    """
    count = getattr(module, "num_experts", None)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(count, int) or not own or any(not each.dim() or len(each) != count for each in own):
        return False
    given = inspect.signature(module.forward).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [each for each in given if each.kind in places]
    required = [each for each in inputs if each.default is inspect.Parameter.empty]
    return _INPUTS in (len(inputs), len(required))  # gpt-oss has defaults for the last two


@contextmanager
def standing_in(module: nn.Module, parts: Mapping[str, torch.Tensor], count: int) -> Iterator[None]:
    """Let a module compute with so many experts, whose parameters are plain tensors."""
    parameters: dict[str, Any] = module._parameters
    before, all_of_them = parameters.copy(), module.num_experts
    parameters.update(parts)
    module.num_experts = count  # type: ignore[assignment]
    try:
        yield
    finally:
        parameters.update(before)
        module.num_experts = all_of_them
