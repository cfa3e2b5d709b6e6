"""Contiguous placement, solved exactly: if any placement in the model's order fits, one is found."""

from collections.abc import Collection, Mapping, Sequence

from accel_bigmodel.device_map.tree import Node, Tree
from accel_core._records import record

Device = int | str


@record
class Unit:
    """Parts that must stay together: a layer, or several that share tensors."""

    nodes: list[Node]
    size: int


def units_of(tree: Tree, no_split: Collection[str]) -> list[Unit]:
    """Cut a model into the smallest parts that may be placed apart."""
    parts: list[Node] = []
    stack = [tree.root]
    while stack:
        node = stack.pop()
        if node.splits(no_split) or (node is tree.root and node.children):
            stack.extend(reversed(node.children))
        else:
            parts.append(node)
    if not tree.ties:
        return [Unit([part], part.size) for part in parts]
    part_of = {id(part): number for number, part in enumerate(parts)}
    first = list(range(len(parts)))

    def root_of(number: int) -> int:
        while first[number] != number:
            number = first[number]
        return number

    for group in tree.ties:
        numbers = set()
        for leaf in group:
            above: Node | None = leaf
            while above is not None and id(above) not in part_of:
                above = above.parent
            if above is not None:
                numbers.add(root_of(part_of[id(above)]))
        lowest = min(numbers)
        for number in numbers:
            first[number] = lowest
    units: dict[int, Unit] = {}
    for number, part in enumerate(parts):
        unit = units.setdefault(root_of(number), Unit([], 0))
        unit.nodes.append(part)
        unit.size += part.size
    return list(units.values())


def _fill(units: Sequence[Unit], limits: Mapping[Device, int]) -> list[tuple[Unit, Device]]:
    """Fill devices in order, each as far as possible; return the units that found a place."""
    placed: list[tuple[Unit, Device]] = []
    for device, limit in limits.items():
        used = 0
        while len(placed) < len(units) and used + units[len(placed)].size <= limit:
            used += units[len(placed)].size
            placed.append((units[len(placed)], device))
    return placed


def contiguous(units: Sequence[Unit], max_memory: Mapping[Device, int]) -> list[tuple[Unit, Device]] | None:
    """Place units in order on devices in order, keeping what fits off the slower ones.

    First the accelerators alone are tried, then with the CPU, then with the disk. Where parts are offloaded, the first
    accelerator in use keeps room for the largest of them.
    """
    accelerators = [device for device in max_memory if device not in ("cpu", "disk")]
    slow: list[Device] = ["cpu"] if "cpu" in max_memory else []
    total = sum(unit.size for unit in units)
    if accelerators:
        placed = _fill(units, {device: max_memory[device] for device in accelerators})
        if len(placed) == len(units):
            return placed
    room: dict[Device, int] = {device: max_memory[device] for device in slow}
    room["disk"] = max_memory.get("disk", total)  # without a limit it holds everything
    tiers: list[list[Device]] = [slow] if slow else []
    for tier in [*tiers, [*slow, "disk"]]:
        for number in range(len(accelerators)):
            found = _with_offload(units, accelerators[number:], tier, {**max_memory, **room})
            if found is not None:
                return found
        placed = _fill(units, {device: room[device] for device in tier})
        if len(placed) == len(units):
            return placed
    return None


def _with_offload(
    units: Sequence[Unit], accelerators: Sequence[Device], slow: Sequence[Device], limits: Mapping[Device, int]
) -> list[tuple[Unit, Device]] | None:
    """Put a prefix on accelerators, the first of which keeps room for the largest unit of the rest."""
    largest = [0] * (len(units) + 1)
    for number in reversed(range(len(units))):
        largest[number] = max(largest[number + 1], units[number].size)
    main = accelerators[0]
    # The smallest reserve first: the smaller it is, the more stays on the accelerators.
    for reserve in sorted(set(largest[1:])):
        if reserve > limits[main]:
            return None
        fast = {device: limits[device] - (reserve if device == main else 0) for device in accelerators}
        placed = _fill(units, fast)
        if not placed or placed[0][1] != main:  # another accelerator can be the first in use
            return None
        if largest[len(placed)] > reserve:
            continue
        placed += _fill(units[len(placed) :], {device: limits[device] for device in slow})
        if len(placed) == len(units):
            return placed
        # A larger reserve would leave still more to the slower devices.
        return None
    return None
