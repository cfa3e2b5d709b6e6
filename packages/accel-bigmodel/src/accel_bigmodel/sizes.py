"""Bytes of a model's modules and layers."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from accel_core.modules.sizes import as_dtype, tensor_bytes
from accel_core.options.enums import CustomDtype

Dtype = str | torch.dtype | CustomDtype


def number_or_text(written: str) -> int | str:
    """Return a whole number as a number, and any other text as it is; no count of bytes has more than 18 digits."""
    return int(written) if written.isdecimal() and len(written) <= 18 else written


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a model, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Count the bytes of every module and tensor of a model; tied tensors count once, under their first name.

    Args:
        model: The model, which may be empty.
        dtype: The dtype its floating point tensors will be loaded in; it never widens them.
        special_dtypes: Dtypes of single tensors by name, whatever they are now.
        buffers_only: Whether to count buffers alone.

    Returns:
        Bytes by dotted name, the whole model's under `""`.

    Examples:
        >>> compute_module_sizes(torch.nn.Linear(2, 3))[""]
        36
    """
    wanted = as_dtype(dtype)
    special = {name: as_dtype(value) for name, value in (special_dtypes or {}).items()}
    sizes: dict[str, int] = defaultdict(int)
    tensors: list[tuple[str, torch.Tensor]] = [] if buffers_only else list(model.named_parameters())
    tensors += model.named_buffers()
    for name, tensor in tensors:
        count = _loaded_bytes(tensor, special[name]) if name in special else tensor_bytes(tensor, wanted)
        sizes[""] += count
        stop = name.find(".")
        while stop >= 0:
            sizes[name[:stop]] += count
            stop = name.find(".", stop + 1)
        sizes[name] += count
    return sizes


def _loaded_bytes(tensor: torch.Tensor, dtype: torch.dtype | CustomDtype | None) -> int:
    """Count the bytes of a tensor that is stored in a dtype, be it wider or narrower."""
    if isinstance(dtype, torch.dtype):
        return tensor.numel() * dtype.itemsize
    return tensor_bytes(tensor, dtype)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Count the bytes of all buffers of a model."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | None,
) -> tuple[int, list[str]]:
    """Find the largest layer: a tensor, a module without submodules, or one of a class that must not be split.

    Args:
        modules: Named modules and tensors to look through, with everything below them.
        module_sizes: Bytes by name, as `compute_module_sizes` gives them.
        no_split_module_classes: Class names of layers that are not looked into.

    Returns:
        The bytes of the largest layer, and the names of all layers of that size.

    Examples:
        >>> sizes = compute_module_sizes(model)
        >>> get_max_layer_size(list(model.named_children()), sizes, ["Block"])
        (16640, ['blocks.0', 'blocks.1'])
    """
    whole = set(no_split_module_classes or ())
    largest, names = 0, []
    stack = list(reversed(modules))
    while stack:
        name, module = stack.pop()
        children = [] if isinstance(module, torch.Tensor) else list(module.named_children())
        if children and type(module).__name__ not in whole:
            stack += [(f"{name}.{child_name}", child) for child_name, child in reversed(children)]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def whole_classes(model: nn.Module) -> Sequence[str]:
    """Return the names of the classes whose modules a model says are not to be split."""
    return getattr(model, "_no_split_modules", None) or ()


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Count the bytes of a model and of its largest layer; one of `_no_split_modules` counts whole."""
    sizes = compute_module_sizes(model)
    whole = whole_classes(model)
    tensors: list[tuple[str, nn.Module | torch.Tensor]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes.get("", 0), get_max_layer_size(tensors, sizes, whole)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """List the names of a mapping of sizes that have no name below them."""
    parents = {""}
    for name in module_sizes:
        stop = name.find(".")
        while stop >= 0:
            parents.add(name[:stop])
            stop = name.find(".", stop + 1)
    return [name for name in module_sizes if name not in parents]
