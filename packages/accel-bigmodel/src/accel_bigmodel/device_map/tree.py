"""A model as a tree of sizes: counted in one pass, its nodes made where they are looked at."""

import difflib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import nn

from accel_bigmodel.device_map.ties import declared_ties, declares_ties
from accel_bigmodel.sizes import Dtype
from accel_core._lazy import without_collection
from accel_core._records import record
from accel_core.logging import get_logger
from accel_core.modules import packed
from accel_core.modules.sizes import as_dtype, tensor_bytes
from accel_core.options.enums import CustomDtype

logger = get_logger(__name__)

_AnyDtype = torch.dtype | CustomDtype | None


@record
class Counts:
    """Bytes of all modules and tensors of a model, in its order: a module comes before what it holds."""

    sizes: list[int] = field(default_factory=list)  # bytes that no earlier part holds: tied tensors count once
    buffer_sizes: dict[int, int] = field(default_factory=dict)  # how many of these are buffers
    layers: dict[int, int] = field(default_factory=dict)  # of the largest layer in each: a leaf, or what stays whole
    ends: dict[int, int] = field(default_factory=dict)  # the number after the last one in each module
    leaf_total: int = 0  # bytes of the modules without submodules
    leaf_count: int = 0  # how many of them have any
    first_no_split: dict[str, int] = field(default_factory=dict)
    repeated: dict[int, list[int]] = field(default_factory=dict)  # by identity, a tensor that comes again
    declaring: list[int] = field(default_factory=list)  # the numbers of the modules that declare ties


class Node:
    """A module or a tensor of a model, with its bytes."""

    __slots__ = ("_children", "_counts", "_name", "is_module", "key", "order", "parent", "value")

    def __init__(
        self, key: str, parent: "Node | None", value: Any, is_module: bool, order: int, counts: Counts
    ) -> None:
        self.key = key
        self.parent = parent
        self.value = value
        self.is_module = is_module
        self.order = order  # its number in the model's order
        self._counts = counts
        self._children: list[Node] | None = None
        self._name: str | None = None

    @property
    def name(self) -> str:
        """Dotted name from the model's root."""
        if self._name is None:
            above = self.parent.name if self.parent is not None else ""
            self._name = f"{above}.{self.key}" if above else self.key
        return self._name

    @property
    def size(self) -> int:
        """Bytes of all tensors in it that no earlier part of the model holds (tied tensors count once)."""
        return self._counts.sizes[self.order]

    @property
    def buffer_size(self) -> int:
        """How many of those are buffers."""
        return self._counts.buffer_sizes.get(self.order, 0)

    @property
    def layer(self) -> int:
        """Bytes of the largest layer in it; a tensor is one only beside the model's own modules."""
        if self.is_module:
            return self._counts.layers[self.order]
        return self.size if self.parent is not None and self.parent.parent is None else 0

    @property
    def children(self) -> "list[Node]":
        """What it consists of: its own parameters, its submodules, its own buffers. A tensor has none."""
        if self._children is None:
            self._children = self._made() if self.is_module else []
        return self._children

    def _made(self) -> "list[Node]":
        module, counts, made, order = self.value, self._counts, [], self.order + 1
        for held, is_module in ((module._parameters, False), (module._modules, True), (module._buffers, False)):
            for key, value in held.items():
                if value is not None:
                    made.append(Node(key, self, value, is_module, order, counts))
                    order = counts.ends.get(order, order + 1)
        return made

    @property
    def submodules(self) -> "list[Node]":
        """The children that are modules."""
        return [child for child in self.children if child.is_module]

    def splits(self, no_split: Collection[str]) -> bool:
        """Return whether its parts may be placed apart."""
        return self.is_module and bool(self.submodules) and type(self.value).__name__ not in no_split

    def leaves(self) -> "Iterator[Node]":
        """Walk the tensors below this node, or the node itself if it is one, in the order of the tree."""
        stack = [self]
        while stack:
            node = stack.pop()
            if node.is_module:
                stack.extend(reversed(node.children))
            else:
                yield node

    def holds(self, other: "Node") -> bool:
        """Return whether another node is this one or below it."""
        # Numbers rise in the model's order, so what is below a module lies between its own and its end.
        return self.order <= other.order < self._counts.ends.get(self.order, self.order + 1)


class Tree:
    """A model's nodes and its tied tensors."""

    def __init__(self, root: Node, counts: Counts) -> None:
        self.root = root
        self.counts = counts
        self.ties: list[list[Node]] = []

    def at(self, order: int) -> Node:
        """Return the node with a given number."""
        node = self.root
        while node.order != order:
            node = node.children[bisect_right(node.children, order, key=lambda child: child.order) - 1]
        return node


def build_tree(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    no_split: Collection[str] = (),
) -> Tree:
    """Count a whole model in one pass, and once what it holds or declares to be tied."""
    special = {name: as_dtype(value) for name, value in (special_dtypes or {}).items()}
    with without_collection():
        counts = _counted(model, as_dtype(dtype), special, frozenset(no_split))
        tree = Tree(Node("", None, model, True, 0, counts), counts)
        tree.ties = [[tree.at(order) for order in orders] for orders in counts.repeated.values()]
        if counts.declaring:
            tree.ties = _with_declared(tree.ties, [tree.at(order) for order in counts.declaring], frozenset(no_split))
    return tree


def no_split_classes(no_split_module_classes: Sequence[str] | None) -> frozenset[str]:
    """Return the classes that must not be split; a single name is allowed."""
    if isinstance(no_split_module_classes, str):
        return frozenset({no_split_module_classes})
    return frozenset(no_split_module_classes or ())


def _counted(model: nn.Module, dtype: _AnyDtype, special: Mapping[str, _AnyDtype], no_split: frozenset[str]) -> Counts:  # noqa: PLR0915
    """Walk over a model once. Models may have hundreds of thousands of modules, so no object is made for each."""
    counts = Counts()
    sizes, buffer_sizes, layers, ends = counts.sizes, counts.buffer_sizes, counts.layers, counts.ends
    append = sizes.append
    first_at: dict[int, int] = {}
    kinds: dict[type, tuple[bool, bool]] = {}  # by class: many modules have few classes
    as_stored = dtype is None and not special and not packed.any_known()

    def bytes_of(tensor: torch.Tensor, name: str) -> int:
        if name in special:
            own = special[name]
            return tensor.numel() * own.itemsize if isinstance(own, torch.dtype) else tensor_bytes(tensor, own)
        return tensor_bytes(tensor, dtype)

    def tensors(held: Mapping[str, torch.Tensor | None], prefix: str) -> int:
        total = 0
        for key, tensor in held.items():
            if tensor is None:
                continue
            order = len(sizes)
            first = first_at.setdefault(id(tensor), order)
            if first != order:
                counts.repeated.setdefault(id(tensor), [first]).append(order)
                append(0)
                continue
            size = tensor.nbytes if as_stored else bytes_of(tensor, prefix + key)
            append(size)
            total += size
        return total

    def visit(module: nn.Module, prefix: str) -> int:
        order = len(sizes)
        append(0)
        kind = type(module)
        about = kinds.get(kind)
        if about is None:
            about = kinds[kind] = bool(getattr(kind, "_tied_weights_keys", None)), kind.__name__ in no_split
        declares, is_whole = about
        if (declares or "_tied_weights_keys" in module.__dict__) and declares_ties(module):
            counts.declaring.append(order)
        if is_whole and order:
            counts.first_no_split.setdefault(kind.__name__, order)
        size = tensors(module._parameters, prefix)
        buffers = layer = 0
        is_leaf = True
        for key, child in module._modules.items():
            if child is None:
                continue
            is_leaf = False
            at = len(sizes)
            size += visit(child, f"{prefix}{key}." if special else "")
            if at in buffer_sizes:
                buffers += buffer_sizes[at]
            if layers[at] > layer:
                layer = layers[at]
        if module._buffers:
            at = len(sizes)
            own = tensors(module._buffers, prefix)
            buffer_sizes.update({number: sizes[number] for number in range(at, len(sizes)) if sizes[number]})
            size += own
            buffers += own
        sizes[order] = size
        if buffers:
            buffer_sizes[order] = buffers
        layers[order] = size if is_whole or is_leaf else layer
        ends[order] = len(sizes)
        if is_leaf and size:
            counts.leaf_total += size
            counts.leaf_count += 1
        return size

    visit(model, "")
    _compare_names(no_split, sorted({kind.__name__ for kind in kinds}))
    return counts


def _compare_names(no_split: frozenset[str], names: list[str]) -> None:
    """Warn, once, if the model has none of the unsplittable classes; models' own lists may fit only in part."""
    if not no_split or not no_split.isdisjoint(names):
        return
    close = [each for name in sorted(no_split) for each in difflib.get_close_matches(name, names, n=1)]
    advice = f"Did you mean {close[0]!r}?" if close else f"Name some of: {', '.join(names[:8])}."
    logger.warning_once(
        "Layers can be kept whole only by the names of their classes; got no_split_module_classes=%s, of which the "
        "model has none, so any layer may be split. %s",
        *(", ".join(sorted(no_split)), advice),
    )


def _with_declared(ties: list[list[Node]], declaring: list[Node], no_split: frozenset[str]) -> list[list[Node]]:
    """Join the groups of tensors that are one with those that modules declare to be one; each counts once."""
    group_of: dict[int, list[Node]] = {id(leaf): group for group in ties for leaf in group}
    for node in declaring:
        skip = len(node.name) + 1 if node.name else 0
        leaves = {leaf.name[skip:]: leaf for leaf in node.leaves()}
        for names in declared_ties(node.value, {name: leaf.value for name, leaf in leaves.items()}):
            groups = [group_of.get(id(leaves[name]), [leaves[name]]) for name in names]
            members = {id(leaf): leaf for group in groups for leaf in group}
            joined = sorted(members.values(), key=lambda leaf: leaf.order)
            for leaf in joined:
                group_of[id(leaf)] = joined
            for leaf in joined[1:]:
                _count_no_more(leaf, no_split)
    return list({id(group): group for group in group_of.values()}.values())


def _count_no_more(leaf: Node, no_split: frozenset[str]) -> None:
    """Subtract a tensor's bytes from it and from everything that holds it."""
    counts, size, buffer_size = leaf._counts, leaf.size, leaf.buffer_size
    node: Node | None = leaf if size else None
    while node is not None:
        counts.sizes[node.order] -= size
        if buffer_size:
            counts.buffer_sizes[node.order] -= buffer_size
        if node.is_module:
            below = node.submodules
            if not below:
                counts.leaf_total -= size
                counts.leaf_count -= not node.size
            is_layer = not below or type(node.value).__name__ in no_split
            counts.layers[node.order] = node.size if is_layer else max(child.layer for child in below)
        node = node.parent
