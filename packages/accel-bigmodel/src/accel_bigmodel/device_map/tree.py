"""A model as a tree of sizes, built in one pass."""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel_bigmodel.device_map.ties import declared_ties, declares_ties
from accel_bigmodel.sizes import Dtype
from accel_core.modules.sizes import as_dtype, tensor_bytes
from accel_core.options.enums import CustomDtype

__all__ = ["Node", "build_tree"]


class Node:
    """A module or a tensor of a model, with its bytes.

    Attributes:
        key: Its name in its parent.
        parent: The module that holds it; None for the model.
        value: The module or tensor.
        size: Bytes of all tensors in it that no earlier part of the model holds (tied tensors count once).
        buffer_size: How many of those are buffers.
        children: What it consists of: its own parameters, its submodules, its own buffers. A tensor has none.
        is_module: Whether it is a module.
        order: Its place in the model, for comparing.
    """

    __slots__ = ("_name", "buffer_size", "children", "is_module", "key", "layer", "order", "parent", "size", "value")

    def __init__(self, key: str, parent: "Node | None", value: Any, is_module: bool, order: int) -> None:
        self.key = key
        self.parent = parent
        self.value = value
        self.is_module = is_module
        self.order = order
        self.size = 0
        self.buffer_size = 0
        self.layer = 0
        self.children: list[Node] = []
        self._name: str | None = None

    @property
    def name(self) -> str:
        """Dotted name from the model's root."""
        if self._name is None:
            above = self.parent.name if self.parent is not None else ""
            self._name = f"{above}.{self.key}" if above else self.key
        return self._name

    @property
    def submodules(self) -> "list[Node]":
        """The children that are modules."""
        return [child for child in self.children if child.is_module]

    def leaves(self) -> "Iterator[Node]":
        """Walk the tensors below, in the order of the tree."""
        stack = [self]
        while stack:
            node = stack.pop()
            if node.is_module:
                stack.extend(reversed(node.children))
            else:
                yield node

    def holds(self, other: "Node") -> bool:
        """Tell whether another node is this one or below it."""
        node: Node | None = other
        while node is not None and node.order >= self.order:
            if node is self:
                return True
            node = node.parent
        return False


class Tree:
    """A model's nodes and its tied tensors.

    Attributes:
        root: The model.
        ties: Groups of tensor nodes that are one tensor; the first is the one whose bytes count.
    """

    def __init__(self, root: Node, ties: list[list[Node]]) -> None:
        self.root = root
        self.ties = ties

    def find(self, name: str) -> Node | None:
        """Find a node by dotted name."""
        node = self.root
        for key in name.split(".") if name else ():
            child = next((child for child in node.children if child.key == key), None)
            if child is None:
                return None
            node = child
        return node


def build_tree(model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None) -> Tree:
    """Count a whole model in one pass, and once what it holds or declares to be tied.

    Args:
        model: The model, which may be empty.
        dtype: The dtype its floating point tensors will be loaded in.
        special_dtypes: Dtypes of single tensors by name.

    Returns:
        The tree.
    """
    wanted = as_dtype(dtype)
    special = {name: as_dtype(value) for name, value in (special_dtypes or {}).items()}
    # Hundreds of thousands of nodes are made and none is dropped: looking for garbage would take most of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _build(model, wanted, special)
    finally:
        if collecting:
            gc.enable()


def _build(
    model: nn.Module,
    wanted: torch.dtype | CustomDtype | None,
    special: Mapping[str, torch.dtype | CustomDtype | None],
) -> Tree:
    seen: dict[int, list[Node]] = {}
    tied: list[list[Node]] = []
    declaring: list[Node] = []
    order = 0
    root = Node("", None, model, True, 0)
    # Own recursion: dotted names are made only where somebody asks for them.
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            size = buffer_size = 0
            for child in node.children:
                size += child.size
                buffer_size += child.buffer_size
            node.size = size
            node.buffer_size = buffer_size
            continue
        order += 1
        node.order = order
        stack.append((node, True))
        module = node.value
        if declares_ties(module):
            declaring.append(node)
        children = node.children
        for key, tensor in module._parameters.items():
            if tensor is not None:
                order += 1
                children.append(_leaf(key, node, tensor, order, wanted, special, seen, tied))
        below = [Node(key, node, child, True, 0) for key, child in module._modules.items() if child is not None]
        children.extend(below)
        stack.extend([(child, False) for child in reversed(below)])
        for key, tensor in module._buffers.items():
            if tensor is not None:
                order += 1
                child = _leaf(key, node, tensor, order, wanted, special, seen, tied)
                child.buffer_size = child.size
                children.append(child)
    return Tree(root, _with_declared(tied, declaring) if declaring else tied)


def _with_declared(ties: list[list[Node]], declaring: list[Node]) -> list[list[Node]]:
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
                _count_no_more(leaf)
    return list({id(group): group for group in group_of.values()}.values())


def _count_no_more(leaf: Node) -> None:
    """Take a tensor's bytes out of it and of everything that holds it."""
    size, buffer_size = leaf.size, leaf.buffer_size
    node: Node | None = leaf if size else None
    while node is not None:
        node.size -= size
        node.buffer_size -= buffer_size
        node = node.parent


def _leaf(
    key: str,
    parent: Node,
    tensor: torch.Tensor,
    order: int,
    dtype: torch.dtype | CustomDtype | None,
    special: Mapping[str, torch.dtype | CustomDtype | None],
    seen: dict[int, list[Node]],
    tied: list[list[Node]],
) -> Node:
    node = Node(key, parent, tensor, False, order)
    group = seen.get(id(tensor))
    if group is None:
        seen[id(tensor)] = [node]
        if special and node.name in special:
            own = special[node.name]
            node.size = tensor.numel() * own.itemsize if isinstance(own, torch.dtype) else tensor_bytes(tensor, own)
        else:
            node.size = tensor_bytes(tensor, dtype)
    else:
        if len(group) == 1:
            tied.append(group)
        group.append(node)
    return node
