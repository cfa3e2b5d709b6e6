"""Walks over the modules and tensors of a model."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, then the buffers, of a module with their names.

    Args:
        module: The module to walk.
        include_buffers: Whether buffers follow the parameters.
        recurse: Whether to walk the submodules too; tied tensors come once, as in `named_parameters`.
        remove_non_persistent: Whether to leave out buffers that `state_dict` does not hold.

    Yields:
        Pairs of dotted name and tensor.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=recurse) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Name the buffers of a module that its `state_dict` leaves out.

    Args:
        module: The module to ask.
        recurse: Whether to ask the submodules too.
        fqns: With `recurse`, whether names are dotted from `module` instead of the buffer's own.

    Returns:
        The names.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    names: set[str] = set()
    for prefix, submodule in module.named_modules():
        own = submodule._non_persistent_buffers_set
        names |= {f"{prefix}.{name}" if prefix else name for name in own} if fqns else own
    return names


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module lists several blocks of one class, as a transformer lists its layers."""
    for submodule in module.modules():
        if isinstance(submodule, nn.ModuleList) and len(submodule) > 1 and len(Counter(map(type, submodule))) == 1:
            return True
    return False


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Find the submodule that holds a tensor directly."""
    path, _, leaf = tensor_name.rpartition(".")
    return module.get_submodule(path), leaf
