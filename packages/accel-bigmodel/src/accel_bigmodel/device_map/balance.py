"""Device maps chosen by a word, and the limits that spread a model evenly over the accelerators."""

from collections.abc import Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.infer import check_accelerators, device_map_of, solve, solve_evenly, warn_of
from accel_bigmodel.device_map.tree import Tree, build_tree, no_split_classes
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.sizes import Dtype
from accel_core.errors import DeviceMapError

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


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


def chosen_device_map(
    model: nn.Module,
    strategy: str,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    offload_buffers: bool = False,
) -> dict[str, int | str]:
    """Choose a device map by a word."""
    if strategy not in _WORDS:
        raise DeviceMapError(
            "If passing a string for `device_map`, please choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'; "
            f"got {strategy!r}. Pass one of these, or a dictionary."
        )
    limits = get_max_memory(max_memory)
    no_split = no_split_classes(no_split_module_classes)
    tree = build_tree(model, dtype, None, no_split)
    if strategy == "sequential":
        solution = solve(tree, limits, no_split)
    else:
        share = get_balanced_memory(model, limits, list(no_split), dtype, low_zero=strategy == "balanced_low_0")
        solution = solve_evenly(tree, limits, share, no_split)
    if max_memory is not None and not {"cpu", "disk"} & set(max_memory):
        check_accelerators(
            solution,
            "Raise the limits, let modules be split, or name 'cpu' in `max_memory` to run without accelerators.",
        )
    warn_of(solution, offload_buffers)
    return device_map_of(solution)
