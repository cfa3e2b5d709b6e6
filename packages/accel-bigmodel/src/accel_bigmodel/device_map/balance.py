"""Limits that spread a model evenly over the accelerators."""

from collections.abc import Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.tree import Tree, build_tree, no_split_classes
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

    Examples:
        >>> limits = get_balanced_memory(model, {"cpu": "1GB", "disk": "4GB"})  # by default, what is free
        >>> limits["cpu"]
        1000000000
    """
    limits = get_max_memory(max_memory)
    accelerators = [device for device in limits if device not in ("cpu", "disk") and limits[device] > 0]
    if len(accelerators) < 2:
        return limits
    tree = build_tree(model, dtype, special_dtypes, no_split_classes(no_split_module_classes))
    root = tree.root
    sharing = len(accelerators) - 1 if low_zero else len(accelerators)
    share = root.size // sharing + _slack(tree)
    for device in accelerators[:-1]:
        limits[device] = min(limits[device], share)
    if low_zero:
        first = accelerators[0]
        rest = sum(limits[device] for device in accelerators[1:])
        limits[first] = min(limits[first], max(0, root.size - rest))
    return limits


def _slack(tree: Tree) -> int:
    """Return slack for uneven layers: a quarter more than the largest unsplittable one, or the mean."""
    counts = tree.counts
    largest = max((counts.sizes[order] for order in counts.first_no_split.values()), default=0)
    mean = counts.leaf_total // counts.leaf_count if counts.leaf_count else 0
    return int(1.25 * max(largest, mean))
