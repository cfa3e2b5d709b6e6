"""Placement in the model's order: each device is filled before the next one."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from accel_bigmodel.device_map.tree import Node, Tree

Device = int | str


def main_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Name the devices that offloaded layers come back to: they keep room for the largest one."""
    accelerators = [device for device in devices if device not in ("cpu", "disk")]
    if "mps" in accelerators:
        return ("mps",)
    return (*accelerators[:1], "cpu")


class Greedy:
    """One run of the placement."""

    def __init__(
        self, tree: Tree, max_memory: Mapping[Device, int], no_split: Collection[str], fallback: bool = False
    ) -> None:
        self.tree = tree
        self.devices = [*max_memory] if "disk" in max_memory else [*max_memory, "disk"]
        self.max_memory = max_memory
        self.no_split = frozenset(no_split)
        self.fallback = fallback
        self.placed: list[tuple[Node, Device]] = []
        self.used: dict[Device, int] = dict.fromkeys(self.devices, 0)
        self._ties = self._ties_by_node()

    def _ties_by_node(self) -> dict[int, list[list[Node]]]:
        found: dict[int, list[list[Node]]] = {}
        for group in self.tree.ties:
            above: set[int] = set()
            for leaf in group:
                node: Node | None = leaf
                while node is not None and id(node) not in above:
                    above.add(id(node))
                    found.setdefault(id(node), []).append(group)
                    node = node.parent
        return found

    def run(self) -> list[tuple[Node, Device]]:
        """Place every part of the model."""
        reserving = set(main_devices(self.devices))
        queue = _Queue(self.tree.root.children)
        number = 0
        while queue:
            device = self.devices[number]
            limit = self.max_memory.get(device)
            # The last device takes what is left; the caller looks whether it fits there.
            if number + 1 == len(self.devices):
                limit = None
            node = queue.take()
            room = None
            if limit is not None:
                room = limit - self.used[device] - (queue.largest_layer if device in reserving else 0)
            tied = self._tied_entries(node, queue)
            splittable = next((entry for entry in tied if entry.splits(self.no_split)), None)
            if room is not None and node.size > room:
                if node.splits(self.no_split):
                    queue.put(node.children)
                    continue
                if self.fallback and self.used[device] == 0 and limit is not None:
                    spare = limit - max(node.layer, queue.largest_layer) if device in reserving else -1
                    if self._fall_back(node, queue, spare, device):
                        continue
            elif room is None or node.size + sum(entry.size for entry in tied) <= room:
                for entry in (node, *tied):
                    self._place(entry, device)
                if tied:
                    gone = {id(entry) for entry in tied}
                    queue.replace([entry for entry in queue if id(entry) not in gone])
                continue
            elif splittable is not None:
                # Too large together: of a part that may be split, only the piece with the shared tensor has to come
                # along.
                rest = (splittable.children if entry is splittable else (entry,) for entry in queue)
                queue.replace([node, *(entry for entries in rest for entry in entries)])
                continue
            queue.put([node])
            number += 1
        return self.placed

    def _fall_back(self, node: Node, queue: "_Queue", room: int, device: Device) -> bool:
        """Place the first remaining part that fits on an empty device, and return whether there is one."""
        found = self._first_that_fits([node, *queue], room)
        if found is None:
            return False
        waiting: list[Node] = []
        for entry in (node, *queue):
            waiting.extend(_without(entry, found) if entry.holds(found) else (entry,))
        queue.replace(waiting)
        self._place(found, device)
        return True

    def _first_that_fits(self, nodes: Sequence[Node], room: int) -> Node | None:
        level = deque(nodes)
        while level:
            entry = level.popleft()
            if entry.size <= room and not self._tied_entries(entry, level):
                return entry
            if entry.splits(self.no_split):
                level.extendleft(reversed(entry.children))  # where it stood, to keep the model's order
        return None

    def _place(self, node: Node, device: Device) -> None:
        self.placed.append((node, device))
        self.used[device] += node.size

    def _tied_entries(self, node: Node, queue: Iterable[Node]) -> list[Node]:
        """List the waiting entries that share a tensor with a node, or with one of those."""
        found: list[Node] = []
        pending = [node]
        while pending:
            member = pending.pop()
            groups = self._ties.get(id(member), ())
            outside = [leaf for group in groups for leaf in group if not member.holds(leaf)]
            if not outside:
                continue
            for entry in queue:
                if any(entry.holds(leaf) for leaf in outside) and not any(entry is other for other in found):
                    found.append(entry)
                    pending.append(entry)  # what is tied to it comes along too
        return found


def _without(node: Node, part: Node) -> list[Node]:
    """List what is left of a node when a part of it is taken out."""
    if node is part:
        return []
    if not node.holds(part):
        return [node]
    return [rest for child in node.children for rest in _without(child, part)]


class _Queue:
    """Parts that wait for a device, in order."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._waiting: list[tuple[Node, int]] = []  # backwards, with the largest layer from the end to there
        self.put(nodes)

    def __iter__(self) -> Iterator[Node]:
        return (node for node, _ in reversed(self._waiting))

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def largest_layer(self) -> int:
        """Bytes of the largest layer in all parts that wait."""
        return self._waiting[-1][1] if self._waiting else 0

    def put(self, nodes: Sequence[Node]) -> None:
        """Put parts at the front of the queue."""
        largest = self.largest_layer
        for node in reversed(nodes):
            largest = max(largest, node.layer)
            self._waiting.append((node, largest))

    def take(self) -> Node:
        """Take the first part."""
        return self._waiting.pop()[0]

    def replace(self, nodes: Sequence[Node]) -> None:
        """Replace the queue by these parts."""
        self._waiting.clear()
        self.put(nodes)
