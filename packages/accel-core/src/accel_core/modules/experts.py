"""Modules that compute the experts of a mixture, as transformers' models have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

_INPUTS = 3
"""Tokens, for each of them the numbers of its experts, and for each of those a weight."""


def number_of_experts(module: nn.Module) -> int:
    """Return how many experts a module computes; 0 for other modules.

    Experts say how many they are in `num_experts`, and are called with tokens (tokens, width), the numbers of each
    token's experts and their weights (tokens, choices).
    """
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int):
        return 0
    given = inspect.signature(module.forward).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [each for each in given if each.kind in places]
    required = [each for each in inputs if each.default is inspect.Parameter.empty]
    return count if _INPUTS in (len(inputs), len(required)) else 0  # gpt-oss has defaults for the last two


def are_stacked(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own whose first size is the number of its experts."""
    count = number_of_experts(module)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(count and own) and all(each.dim() and len(each) == count for each in own)


def inputs_by_place(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return tokens, numbers and weights, whatever a forward method calls them."""
    return inspect.signature(forward).bind(*args, **kwargs).args if kwargs else tuple(args)
