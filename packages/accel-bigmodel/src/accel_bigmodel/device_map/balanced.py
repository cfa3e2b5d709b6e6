"""Device maps chosen by a word: "auto", "balanced", "balanced_low_0" or "sequential"."""

from collections.abc import Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.balance import get_balanced_memory
from accel_bigmodel.device_map.infer import check_accelerators, device_map_of, solve, solve_evenly, warn_of
from accel_bigmodel.device_map.tree import build_tree, no_split_classes
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.sizes import Dtype
from accel_core.errors import DeviceMapError

__all__ = ["chosen_device_map"]

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


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
