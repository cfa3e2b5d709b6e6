"""Tied tensors: one parameter registered under several names."""

from torch import nn


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """List the groups of parameter names that are one parameter.

    Identity decides, not the storage: on the meta device all storages look alike.

    Args:
        model: The model to look through.
        kwargs: Accepted and unused; callers of older versions pass their recursion's state.

    Returns:
        One sorted list of dotted names per tied parameter, in the order of first registration.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
        >>> model[1].weight = model[0].weight
        >>> find_tied_parameters(model)
        [['0.weight', '1.weight']]
    """
    return tied_tensor_groups(model, include_buffers=False)


def tied_tensor_groups(model: nn.Module, include_buffers: bool = True) -> list[list[str]]:
    """List the groups of names that are one parameter or one buffer."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    if include_buffers:
        for name, buffer in model.named_buffers(remove_duplicate=False):
            names.setdefault(id(buffer), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]
