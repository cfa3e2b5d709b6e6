"""Limits that spread a model evenly over the accelerators."""

from collections.abc import Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.tree import Node, build_tree
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.sizes import Dtype

__all__ = ["get_balanced_memory"]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Lower the limits of the accelerators so that each gets an even share of a model.

    Args:
        model: The model, which may be empty.
        max_memory: Bytes or written sizes by device; by default what is free.
        no_split_module_classes: Class names of modules that stay on one device.
        dtype: The dtype the weights will be loaded in.
        special_dtypes: Dtypes of single tensors by name.
        low_zero: Whether the first accelerator gets as little as possible, for other work to be done there.

    Returns:
        Bytes by device. The last accelerator keeps its limit, so that nothing is left over.
    """
    limits = get_max_memory(max_memory)
    accelerators = [device for device in limits if device not in ("cpu", "disk") and limits[device] > 0]
    if len(accelerators) < 2:
        return limits
    root = build_tree(model, dtype, special_dtypes).root
    sharing = len(accelerators) - 1 if low_zero else len(accelerators)
    share = root.size // sharing + _slack(root, no_split_module_classes)
    for device in accelerators[:-1]:
        limits[device] = min(limits[device], share)
    if low_zero:
        first = accelerators[0]
        rest = sum(limits[device] for device in accelerators[1:])
        limits[first] = min(limits[first], max(0, root.size - rest))
    return limits


def _slack(root: Node, no_split_module_classes: Sequence[str] | None) -> int:
    """Give room for layers not dividing evenly: a quarter more than the largest that must stay whole, or the mean."""
    whole = (
        {no_split_module_classes} if isinstance(no_split_module_classes, str) else set(no_split_module_classes or ())
    )
    largest: dict[str, int] = {}
    total = count = 0
    stack = [root]
    while stack:
        node = stack.pop()
        name = type(node.value).__name__
        if name in whole and node is not root:
            largest.setdefault(name, node.size)
        below = node.submodules
        if not below and node.size:
            total += node.size
            count += 1
        stack.extend(reversed(below))
    mean = total // count if count else 0
    return int(1.25 * max(max(largest.values(), default=0), mean))
