"""How the tensors of a nest lie in one buffer of bytes.

A layout is made once for every structure, shape and dtype that a program sends, and remembered: a training loop
gathers the same few again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from accel_core._records import record
from accel_core.comm.transport import digest_of
from accel_core.comm.tree import TreeSpec, flatten, leaf_paths, spec_text
from accel_core.errors import UnsupportedTypeError

_ALIGNMENT = 16
_REMEMBERED = 512
_MIN_STACKED = 4
"""Number of tensors of one shape from which they are moved as one stack."""
_ALONE = 16 * 2**20
"""Bytes from which a tensor travels by itself, so that it is never copied into a buffer."""
_unbind_copy: Callable[..., Any] = torch.unbind_copy
_split_copy: Callable[..., Any] = torch.split_with_sizes_copy


@record(frozen=True)
class Block:
    """Neighbors in a segment: a stack of tensors of one shape, or tensors of any shapes."""

    members: tuple[int, ...]  # their places among the leaves of the nest
    sizes: tuple[int, ...]  # their numbers of elements
    shape: torch.Size | None  # the shape that all have, or `None`
    first: int  # where they begin in the segment, in elements
    last: int  # where they end in the segment, in elements


@record(frozen=True)
class Segment:
    """The tensors of one dtype, one after the other."""

    dtype: torch.dtype  # their dtype
    blocks: tuple[Block, ...]  # who they are
    start: int  # first byte in the buffer
    stop: int  # byte after the last one


@record(frozen=True)
class Layout:
    """Where each tensor of a nest lies in a buffer.

    Attributes:
        segments: One for each dtype.
        alone: Places of the leaves that are too large to be packed.
        nbytes: Length of the buffer.
        shapes: Every leaf's shape.
        gathered: Every leaf's shape after a gather.
        digest: 16 bytes that stand for structure, shapes and dtypes.
        devices: Every leaf's device where some are elsewhere than the buffer, else `None`.
    """

    segments: tuple[Segment, ...]
    alone: tuple[int, ...]
    nbytes: int
    shapes: tuple[torch.Size, ...]
    gathered: tuple[tuple[int, ...], ...]
    digest: bytes
    devices: tuple[torch.device, ...] | None

    def pack(self, leaves: list[torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy tensors into a uint8 buffer of at least `nbytes`; call it under `torch.no_grad`."""
        if self.devices is not None:
            leaves = [leaf if n in self.alone else leaf.to(buffer.device) for n, leaf in enumerate(leaves)]
        for segment in self.segments:
            room = buffer[segment.start : segment.stop].view(segment.dtype)
            for block in segment.blocks:
                part = room[block.first : block.last]
                pieces = [leaves[member] for member in block.members]
                # One call of torch for a whole block, into the buffer itself: with many small tensors it is the
                # calls that cost, and a stack needs no reshaping of each.
                if block.shape is not None:
                    torch.stack(pieces, out=part.view(len(pieces), *block.shape))
                elif len(pieces) == 1:
                    part.view(pieces[0].shape).copy_(pieces[0])
                else:
                    torch.cat([piece.reshape(-1) for piece in pieces], out=part)

    def unpack_rows(self, rows: torch.Tensor, results: list[Any]) -> None:
        """Take every rank's copy out of received buffers, ranks along each tensor's first dim."""
        for segment in self.segments:
            held = rows[:, segment.start : segment.stop].view(segment.dtype)
            for block in segment.blocks:
                part = held[:, block.first : block.last]
                # Copies, by the functions that end in `_copy`: a view into the frame changes with the next operation.
                if block.shape is not None:
                    count = len(block.members)
                    stacked = part.view(len(part), count, *block.shape).transpose(0, 1)
                    wanted = self.gathered[block.members[0]]
                    _assign(results, block, _unbind_copy(stacked.reshape(count, *wanted)))
                else:
                    for member, piece in zip(block.members, _split_copy(part, block.sizes, dim=1), strict=True):
                        results[member] = piece.view(self.gathered[member])

    def unpack(self, segment: Segment, data: torch.Tensor, results: list[Any]) -> None:
        """Take the tensors of one segment out of its elements."""
        for block in segment.blocks:
            part = data[block.first : block.last]
            if block.shape is not None:
                _assign(results, block, _unbind_copy(part.view(len(block.members), *block.shape)))
            else:
                for member, piece in zip(block.members, _split_copy(part, block.sizes), strict=True):
                    results[member] = piece.view(self.shapes[member])

    def restore(self, results: list[Any]) -> list[Any]:
        """Move results back to the devices from which the leaves came."""
        if self.devices is None:
            return results
        return [result.to(device) for result, device in zip(results, self.devices, strict=True)]


def _assign(results: list[Any], block: Block, pieces: Sequence[torch.Tensor]) -> None:
    for member, piece in zip(block.members, pieces, strict=True):
        results[member] = piece


_layouts: dict[tuple[Any, ...], Layout] = {}
_on_host = attrgetter("shape", "dtype", "is_cpu", "layout")
_on_device = attrgetter("shape", "dtype", "device")
_is_nested = attrgetter("is_nested")


def lay_out(nest: object, operation: str, device: torch.device, world_size: int) -> tuple[list[torch.Tensor], Layout]:
    """Take a nest of tensors apart, and find where each of them lies in a buffer.

    Raises:
        UnsupportedTypeError: A leaf is not a tensor, or one that is sparse, quantized, nested or without memory.
    """
    leaves, spec = flatten(nest, operation)
    # A nested tensor has no shape to look a layout up by, so it has to be found first.
    if any(map(_is_nested, leaves)):
        check_kinds(nest, operation)
    key: tuple[Any, ...] = (spec, world_size, device, tuple(map(_on_host, leaves)))
    if device.type != "cpu":
        key = (*key, tuple(map(_on_device, leaves)))
    layout = _layouts.get(key)
    if layout is None:
        check_kinds(nest, operation)
        if len(_layouts) >= _REMEMBERED:
            _layouts.pop(next(iter(_layouts)))  # the oldest: ever new shapes must not fill the memory
        layout = _layouts[key] = _lay_out(leaves, spec, device, world_size)
    return leaves, layout


def check_kinds(nest: object, operation: str, *, allow_nested: bool = False) -> None:
    """Refuse tensors that have no memory with one value after the other, before anything is sent."""
    for path, leaf in leaf_paths(nest):
        kind, remedy = _kind_of(leaf)
        if kind and not (allow_nested and kind == "nested"):
            raise UnsupportedTypeError(
                f"`{operation}` sends dense tensors; got a {kind} one{f' at {path}' if path else ''}. {remedy}"
            )


def _kind_of(leaf: torch.Tensor) -> tuple[str, str]:
    """Return what keeps a tensor from being sent and what to do about it; two empty texts where nothing does."""
    if leaf.is_nested:
        return "nested", "Call .to_padded_tensor(value) on it first."
    if leaf.layout is not torch.strided:
        return str(leaf.layout).removeprefix("torch."), "Call .to_dense() on it first, or use gather_object."
    if leaf.is_quantized:
        return "quantized", "Call .dequantize() on it first, or use gather_object."
    if leaf.is_meta:
        return "meta", "It has a shape and no values: load them first."
    return "", ""


def _lay_out(leaves: Sequence[torch.Tensor], spec: TreeSpec, device: torch.device, world_size: int) -> Layout:
    alone = tuple(place for place, leaf in enumerate(leaves) if leaf.nbytes >= _ALONE)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if place not in alone:
            by_dtype.setdefault(leaf.dtype, []).append(place)
    segments, start = [], 0
    for dtype, members in by_dtype.items():
        parts = _blocks(leaves, members)
        stop = start + parts[-1].last * dtype.itemsize
        segments.append(Segment(dtype, parts, start, stop))
        # A view of bytes as wider numbers has to begin at a multiple of their size.
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
    shapes = tuple(leaf.shape for leaf in leaves)
    in_place = all(leaf.device == device for leaf in leaves)
    text = spec_text(spec) + "|" + ";".join(f"{leaf.dtype}{tuple(leaf.shape)}" for leaf in leaves)
    return Layout(
        segments=tuple(segments),
        alone=alone,
        nbytes=start,
        shapes=shapes,
        gathered=tuple((world_size * (shape[0] if shape else 1), *shape[1:]) for shape in shapes),
        digest=digest_of(text),
        devices=None if in_place else tuple(leaf.device for leaf in leaves),
    )


def _blocks(leaves: Sequence[torch.Tensor], members: Sequence[int]) -> tuple[Block, ...]:
    """Bring tensors of one shape together where there are several; the others make one block."""
    by_shape: dict[torch.Size, list[int]] = {}
    for member in members:
        by_shape.setdefault(leaves[member].shape, []).append(member)
    groups: list[tuple[torch.Size | None, list[int]]] = []
    others = []
    for shape, same in by_shape.items():
        if len(same) >= _MIN_STACKED:
            groups.append((shape, same))
        else:
            others += same
    if others:
        groups.append((None, others))
    blocks, first = [], 0
    for common, group in groups:
        sizes = tuple(leaves[member].numel() for member in group)
        blocks.append(Block(tuple(group), sizes, common, first, first + sum(sizes)))
        first += sum(sizes)
    return tuple(blocks)
