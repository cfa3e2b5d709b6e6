"""The device map of a model: in its own order, within the limits, every tensor exactly once."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.check import AnyDevice, clean_device_map
from accel_bigmodel.device_map.greedy import Greedy
from accel_bigmodel.device_map.tree import build_tree
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.sizes import Dtype
from accel_core.logging import get_logger

__all__ = ["infer_auto_device_map"]

logger = get_logger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Decide which device holds which part of a model.

    Args:
        model: The model, which may be empty.
        max_memory: Bytes or written sizes by device; by default what is free.
        no_split_module_classes: Class names of modules that stay on one device.
        dtype: The dtype the weights will be loaded in.
        special_dtypes: Dtypes of single tensors by name.
        verbose: Whether every decision is logged.
        clean_result: Whether parts that all go to one device become their parent's entry.
        offload_buffers: Whether the buffers of offloaded layers are away too.
        fallback_allocation: Whether an empty device that the next module does not fit on is given a smaller one.

    Returns:
        Devices by name of submodule or tensor.
    """
    limits = get_max_memory(max_memory)
    whole = [no_split_module_classes] if isinstance(no_split_module_classes, str) else (no_split_module_classes or ())
    tree = build_tree(model, dtype, special_dtypes)
    placed = Greedy(tree, limits, whole, fallback_allocation).run()
    result: dict[str, AnyDevice] = OrderedDict((node.name, device) for node, device in placed)
    if clean_result:
        clean_device_map(result)
    return result
