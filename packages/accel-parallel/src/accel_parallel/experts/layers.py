"""Which modules of a model are experts, and whether ranks can share them out."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping

from torch import nn

from accel_core.errors import PreparationError
from accel_core.mesh.tensor import is_spread
from accel_parallel.sharding.replaced import refuse_hooks

__all__ = ["experts_of", "is_experts", "parameter_names"]

_INPUTS = 3
"""Tokens, for each of them the numbers of its experts, and for each of those a weight."""


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a set of experts as transformers has them.

    It says how many there are in `num_experts`, which is the first size of each parameter of its own, and is called
    with tokens (tokens, width), the numbers of each token's experts and their weights (tokens, choices).
    """
    count = getattr(module, "num_experts", None)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(count, int) or not own or any(not each.dim() or len(each) != count for each in own):
        return False
    return _inputs(module) == _INPUTS


def _inputs(module: nn.Module) -> int:
    """Return how many inputs a module has to be given."""
    given = inspect.signature(module.forward).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in places and each.default is inspect.Parameter.empty for each in given)


def experts_of(model: nn.Module, ranks: int) -> dict[str, nn.Module]:
    """Return the experts of a bare model by the names of their modules; changes nothing.

    Raises:
        PreparationError: There are none, or they cannot be shared out among so many ranks.
    """
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise PreparationError(
            f"Expert parallel shares out the experts of a mixture; got ep_size={ranks} and {type(model).__name__}, in "
            "which none were found. Leave ep_size at 1 for a dense model. Experts are a module with num_experts, with "
            "parameters of the shape (num_experts, ...), that is called with tokens, expert numbers and weights; a "
            "list of modules has to be stacked into such parameters first."
        )
    places = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    adapted = {id(base): name for name, module in model.named_modules() if (base := _base_of(module)) is not None}
    for name, module in found.items():
        if id(module) in adapted:
            raise PreparationError(
                f"Adapters on experts change weights that lie on several ranks; got {adapted[id(module)]}, an adapter "
                f"on the experts {name}. Adapt other layers, such as those of attention, or set ep_size=1."
            )
        _check(name, module, ranks)
        shared = [own for own, each in module._parameters.items() if each is not None and places[id(each)] > 1]
        if shared:
            raise PreparationError(
                f"Weights of experts belong to one module; got {', '.join(shared)} of {name}, which others share. Give "
                "each module weights of its own, or set ep_size=1."
            )
    return found


def _base_of(module: nn.Module) -> nn.Module | None:
    """Return what an adapter stands in front of, the innermost where there are several; `None` for other modules."""
    base = module._modules.get("base_layer")
    return None if base is None else _base_of(base) or base


def _check(name: str, module: nn.Module, ranks: int) -> None:
    """Refuse experts that cannot be shared out evenly."""
    count: int = module.num_experts  # type: ignore[assignment]
    if count % ranks:
        raise PreparationError(
            f"Each rank of expert parallel holds as many experts as the others; got num_experts={count} of "
            f"{name} and ep_size={ranks}. Use an ep_size that divides {count}."
        )
    own = list(module.named_parameters(name, recurse=False))
    refuse_hooks(own)
    for full, parameter in own:
        if is_spread(parameter) or not parameter.is_floating_point():
            how = "spread over ranks already" if is_spread(parameter) else f"packed as {parameter.dtype}"
            raise PreparationError(
                f"Experts are shared out as they were loaded on one device, unpacked; got {full}, which is {how}. Load "
                "the model whole, or set ep_size=1."
            )


def parameter_names(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of the parameters of experts."""
    own = {id(each) for module in modules.values() for each in module._parameters.values()}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in own)
