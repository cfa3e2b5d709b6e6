"""The device map of a model: in its own order, within the limits, every tensor exactly once."""

import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.check import clean_device_map
from accel_bigmodel.device_map.exact import Unit, contiguous, units_of
from accel_bigmodel.device_map.greedy import Greedy
from accel_bigmodel.device_map.tree import Node, Tree, build_tree, no_split_classes
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.sizes import Dtype
from accel_core._lazy import without_collection
from accel_core._records import record
from accel_core.errors import DeviceMapError
from accel_core.logging import get_logger
from accel_core.modules.sizes import written_size

logger = get_logger(__name__)

Device = int | str


@record(frozen=True)
class Solution:
    """A placement and what it takes."""

    tree: Tree
    placed: list[tuple[Node, Device]]  # in the order of placing
    limits: dict[Device, int]
    used: dict[Device, int]  # bytes of weights
    main: Device  # where offloaded parts compute
    largest_offloaded: int  # bytes of the largest layer that comes back to it
    offloaded_buffers: int  # bytes
    no_split: Collection[str]

    @property
    def fits(self) -> bool:
        """Whether no device holds more than its limit."""
        return all(count <= self.limits[device] for device, count in self.used.items() if device in self.limits)

    @property
    def idle(self) -> list[Device]:
        """The accelerators, if weights were spilled although none of them holds any."""
        fast = [device for device, limit in self.limits.items() if device not in ("cpu", "disk") and limit > 0]
        return fast if self.slowest and not any(self.used[device] for device in fast) else []

    @property
    def largest(self) -> Unit:
        """The largest part that must stay on one device."""
        return max(units_of(self.tree, self.no_split), key=lambda unit: unit.size)

    @property
    def keeps_room(self) -> bool:
        """Whether the main device has room for the largest offloaded layer."""
        limit = self.limits.get(self.main)
        return self.main in ("cpu", "disk") or limit is None or self.used[self.main] + self.largest_offloaded <= limit

    @property
    def slowest(self) -> int:
        """How far weights were spilled: 0 for accelerators alone, 1 with the CPU, 2 with the disk."""
        return 2 if self.used.get("disk") else 1 if self.used.get("cpu") else 0


def _solution(
    tree: Tree, placed: list[tuple[Node, Device]], limits: dict[Device, int], no_split: Collection[str]
) -> Solution:
    used: dict[Device, int] = dict.fromkeys(limits, 0)
    for node, device in placed:
        used[device] = used.get(device, 0) + node.size
    fast = [device for device in limits if device not in ("cpu", "disk")]
    main: Device = next((device for device in fast if any(target == device for _, target in placed)), "cpu")
    away = ("disk",) if main in ("cpu", "mps") else ("cpu", "disk")
    offloaded = [node for node, device in placed if device in away]
    largest = max((_largest_layer(node, no_split) for node in offloaded), default=0)
    return Solution(tree, placed, limits, used, main, largest, sum(node.buffer_size for node in offloaded), no_split)


def _largest_layer(node: Node, no_split: Collection[str]) -> int:
    return max(_largest_layer(child, no_split) for child in node.children) if node.splits(no_split) else node.size


def solve(tree: Tree, limits: dict[Device, int], no_split: Collection[str]) -> Solution:
    """Place a model: by filling the devices in order, or better where that wastes them.

    Raises:
        DeviceMapError: When even the disk has a limit, and the model does not fit.
    """
    with without_collection():
        return _solve(tree, limits, no_split, _fill(tree, limits, no_split))


def _fill(tree: Tree, limits: dict[Device, int], no_split: Collection[str], fallback: bool = False) -> Solution:
    """Fill the devices in order; only the first one keeps room for offloaded layers."""
    return _solution(tree, Greedy(tree, limits, no_split, fallback).run(), limits, no_split)


def _solve(tree: Tree, limits: dict[Device, int], no_split: Collection[str], first: Solution) -> Solution:
    if first.keeps_room and first.slowest == 0:
        return first
    pairs = contiguous(units_of(tree, no_split), limits)
    if pairs is not None:
        nodes = [(node, device) for unit, device in pairs for node in unit.nodes]
        exact = _solution(tree, nodes, limits, no_split)
        if not first.keeps_room or not first.fits or exact.slowest < first.slowest:
            return exact
    elif not first.keeps_room or not first.fits:
        raise DeviceMapError(
            f"The model does not fit into `max_memory`; got {written_size(tree.root.size)} of weights, with "
            f"{_block(first)} as the largest part that stays on one device, for limits of {_written(limits)}. Raise "
            "the limits, give the disk none, or let modules be split."
        )
    return first


def solve_evenly(
    tree: Tree, limits: dict[Device, int], share: dict[Device, int], no_split: Collection[str]
) -> Solution:
    """Place a model within even shares, or within the limits if only the shares spill weights."""
    solution = solve(tree, share, no_split)
    if not solution.slowest or share == limits:
        return solution
    plain = solve(tree, limits, no_split)
    return plain if plain.slowest < solution.slowest or solution.idle else solution


def _block(solution: Solution) -> str:
    unit = solution.largest
    names = " with ".join(repr(node.name) for node in unit.nodes)
    return f"{names} of {written_size(unit.size)}"


def _written(limits: Mapping[Device, int]) -> str:
    return ", ".join(f"{device}: {written_size(limit)}" for device, limit in limits.items())


def _idle(solution: Solution) -> str:
    """Describe why no accelerator can be used: the largest layer, and the limits."""
    limits = {device: solution.limits[device] for device in solution.idle}
    return (
        "No accelerator has room for the largest layer beside its own part; got "
        f"{_block(solution)}, for limits of {_written(limits)}."
    )


def check_accelerators(solution: Solution, advice: str) -> None:
    """Check that accelerators are used if weights are spilled."""
    if solution.idle:
        raise DeviceMapError(f"{_idle(solution)} {advice}")


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

    Devices are filled in order: accelerators, then the CPU, then the disk. Every parameter and buffer is placed exactly
    once and tied ones together; if any contiguous placement fits without a slower device, that device is not used.
    Where no accelerator could be used with room for the largest offloaded layer, they are filled without it.

    Args:
        model: The model, which may be empty.
        max_memory: Bytes or written sizes by device; by default what is free.
        no_split_module_classes: Class names of modules that stay on one device.
        dtype: The dtype the weights will be loaded in.
        special_dtypes: Dtypes of single tensors by name.
        verbose: Whether the device and size of every part are logged.
        clean_result: Whether parts that all go to one device become their parent's entry.
        offload_buffers: Whether the buffers of offloaded layers are away too.
        fallback_allocation: Whether an empty device that the next module does not fit on is given a smaller one.

    Returns:
        Devices by name of submodule or tensor.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> dict(infer_auto_device_map(model, max_memory={"cpu": "1KiB"}))
        {'': 'cpu'}
    """
    limits = get_max_memory(max_memory)
    no_split = no_split_classes(no_split_module_classes)
    with without_collection():
        tree = build_tree(model, dtype, special_dtypes, no_split)
        filled = _fill(tree, limits, no_split, fallback_allocation)
        solution = _solve(tree, limits, no_split, filled)
    if solution.idle and filled.fits and not filled.idle:
        solution = filled
    if verbose:
        for node, device in solution.placed:
            logger.info("Putting %s (size=%s) on %s.", node.name or "the model", node.size, device)
    warn_of(solution, offload_buffers)
    return device_map_of(solution, clean_result)


def device_map_of(solution: Solution, clean: bool = True) -> dict[str, Device]:
    """Write a placement as a device map."""
    result: dict[str, Device] = OrderedDict((node.name, device) for node, device in solution.placed)
    return clean_device_map(result) if clean else result


def warn_of(solution: Solution, offload_buffers: bool) -> None:
    """Warn of buffers that will not fit, and of accelerators that cannot be used."""
    if solution.idle:
        logger.warning("%s The model runs on the CPU. Raise the limits, or let modules be split.", _idle(solution))
    elif not solution.keeps_room:
        logger.warning(
            "%s has no room for the largest offloaded layer beside its own part; got %s, for a limit of %s. Raise the "
            "limits, or let modules be split, if memory runs out.",
            *(solution.main, *map(written_size, (solution.largest_offloaded, solution.limits[solution.main]))),
        )
    buffers = solution.tree.root.buffer_size if solution.idle else solution.offloaded_buffers
    largest = solution.largest.size if solution.idle else solution.largest_offloaded
    homes = [target for target in solution.idle or [solution.main] if target in solution.limits and target != "cpu"]
    free = max((solution.limits[target] - solution.used[target] for target in homes), default=None)
    # The largest offloaded layer comes to the device while the buffers are on it.
    if free is not None and not offload_buffers and buffers and buffers + largest > free:
        warnings.warn(
            f"No accelerator has room for the buffers of the offloaded layers; got {buffers} bytes of buffers and a "
            f"layer of {largest}, for {free} bytes that are left. Pass `offload_buffers=True` if memory runs out.",
            UserWarning,
            stacklevel=3,
        )
