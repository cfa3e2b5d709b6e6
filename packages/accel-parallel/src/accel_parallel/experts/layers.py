"""Which modules of a model are experts, and whether ranks can share them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from accel_core.errors import PreparationError
from accel_core.mesh.tensor import is_spread
from accel_core.modules.experts import are_stacked, number_of_experts
from accel_parallel.sharding.param_attrs import refuse_hooks


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a set of experts as transformers has them, or a list of them that is called so.

    It says how many there are in `num_experts`, and is called with tokens (tokens, width), the numbers of each token's
    experts and their weights (tokens, choices). Either it has parameters of its own, whose first size that number is,
    or as many modules, one for each expert, and nothing else.
    """
    return are_stacked(module) or (bool(experts := listed(module)) and len(experts) == number_of_experts(module))


def listed(module: nn.Module) -> list[nn.Module]:
    """Return the experts of a module that has one module for each; none of one that has their parameters itself."""
    there = [(name, each) for name, each in module._modules.items() if each is not None]
    numbered = [name for name, _ in there] == [str(number) for number in range(len(there))]
    return [each for _, each in there] if numbered and not module._parameters else []


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of experts with their names in the module."""
    return list(module.named_parameters(recurse=bool(listed(module)), remove_duplicate=False))


def experts_of(model: nn.Module, ranks: int) -> dict[str, nn.Module]:
    """Return the experts of a bare model by the names of their modules; changes nothing.

    Raises:
        PreparationError: There are none, or they cannot be shared out among so many ranks.
    """
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise PreparationError(
            f"Expert parallel shares out the experts of a mixture; got ep_size={ranks} and {type(model).__name__}, in "
            "which none were found. Leave ep_size at 1 for a dense model. Experts are a module with num_experts that "
            "is called with tokens, expert numbers and weights, and has parameters of the shape (num_experts, ...) or "
            "as many modules. Give a plain ModuleList such a forward method: a loop outside of it calls experts that "
            "other ranks hold."
        )
    places = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    adapted = {id(base): name for name, module in model.named_modules() if (base := _base_of(module)) is not None}
    for name, module in found.items():
        if id(module) in adapted:
            raise PreparationError(
                f"An adapter in front of experts changes weights that lie on several ranks; got {adapted[id(module)]}, "
                f"an adapter on the experts {name}. Adapt other layers, such as those of attention, make the experts a "
                "list of modules, which can have adapters inside, or set ep_size=1."
            )
        _check(name, module, ranks)
        shared = [own for own, each in parameters_of(module) if places[id(each)] > 1]
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
    count = number_of_experts(module)
    if count % ranks:
        raise PreparationError(
            f"Each rank of expert parallel holds as many experts as the others; got num_experts={count} of "
            f"{name} and ep_size={ranks}. Use an ep_size that divides {count}."
        )
    _refuse_unequal(name, listed(module))
    beside = {} if listed(module) else dict([*module.named_buffers(), *module.named_parameters()])
    rows = [each for each, own in beside.items() if each not in module._parameters and own.shape[:1] == (count,)]
    if rows:
        raise PreparationError(
            "Of stacked experts the parameters of their own module are cut, and numbers begin with 0 on each rank; got "
            f"{name}.{rows[0]}, which has a row for each expert. Make it a parameter of {name}, with "
            "requires_grad=False where it does not train, or set ep_size=1."
        )
    own = [(f"{name}.{each}", parameter) for each, parameter in parameters_of(module)]
    refuse_hooks(own)
    for full, parameter in own:
        if is_spread(parameter) or not parameter.is_floating_point():
            how = "spread over ranks already" if is_spread(parameter) else f"packed as {parameter.dtype}"
            raise PreparationError(
                f"Experts are shared out as they were loaded on one device, unpacked; got {full}, which is {how}. Load "
                "the model whole, or set ep_size=1."
            )


def _refuse_unequal(name: str, experts: list[nn.Module]) -> None:
    """Refuse a list of experts of different sizes, or with buffers, of which only one rank would have the values."""
    held = [{own: (tuple(each.shape), each.dtype) for own, each in expert.named_parameters()} for expert in experts]
    for number, own in enumerate(held):
        if own != held[0]:
            odd = sorted(dict(held[0].items() ^ own.items()))
            raise PreparationError(
                f"Experts of a list have parameters of the same names, shapes and formats; got {name}.{number}, which "
                f"differs from {name}.0 in {', '.join(odd)}. Make them equal, or set ep_size=1."
            )
    buffers = [f"{name}.{number}.{own}" for number, expert in enumerate(experts) for own, _ in expert.named_buffers()]
    if buffers:
        raise PreparationError(
            "Of an expert only one rank would have the current buffers; got "
            f"{buffers[0]}. Use experts without buffers, or set ep_size=1."
        )


def parameter_names(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of the parameters of experts."""
    own = {id(each) for module in modules.values() for _, each in parameters_of(module)}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in own)
