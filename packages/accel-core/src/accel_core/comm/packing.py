"""How the tensors of a nest lie in one buffer of bytes.

A layout is made once for every structure, shape and dtype that a program sends, and remembered: a training loop
gathers the same few again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_core.comm.transport import digest_of
from accel_core.comm.tree import Skeleton, skeleton_text

__all__ = ["Block", "Layout", "layout_of", "split_copy"]

_ALIGNMENT = 16
_REMEMBERED = 512
_ALONE = 16 * 2**20
"""Bytes from which a tensor travels by itself, so that it is never copied into a buffer."""


@dataclass(frozen=True)
class Block:
    """The tensors of one dtype, one after the other.

    Attributes:
        dtype: Their dtype.
        members: Their places among the leaves of the nest.
        sizes: Their numbers of elements.
        start: First byte of the block in the buffer.
        stop: Byte after the last one.
    """

    dtype: torch.dtype
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a nest lies in a buffer.

    Attributes:
        blocks: One for each dtype.
        alone: Places of the leaves that are too large to be packed.
        nbytes: Length of the buffer.
        shapes: Every leaf's shape.
        digest: 16 bytes that stand for structure, shapes and dtypes.
        devices: Every leaf's device where some are elsewhere than the buffer, else `None`.
        gathered: Every leaf's shape after a gather.
    """

    blocks: tuple[Block, ...]
    alone: tuple[int, ...]
    nbytes: int
    shapes: tuple[torch.Size, ...]
    digest: bytes
    devices: tuple[torch.device, ...] | None
    gathered: tuple[tuple[int, ...], ...]

    def pack(self, leaves: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy tensors into a uint8 buffer of at least `nbytes`; call it without gradients."""
        for block in self.blocks:
            room = buffer[block.start : block.stop].view(block.dtype)
            pieces = [leaves[member].reshape(-1) for member in block.members]
            if self.devices is not None:
                pieces = [piece.to(buffer.device) for piece in pieces]
            if len(pieces) == 1:
                room.copy_(pieces[0])
            else:
                torch.cat(pieces, out=room)

    def unpack_rows(self, rows: torch.Tensor, results: list[Any]) -> None:
        """Take every rank's copy out of received buffers, ranks along each tensor's first dim.

        Args:
            rows: uint8, shape `(ranks, at least nbytes)`.
            results: Receives the tensors at their places.
        """
        for block in self.blocks:
            held = rows[:, block.start : block.stop].view(block.dtype)
            pieces = split_copy(held, block.sizes, dim=1)
            for member, piece in zip(block.members, pieces, strict=True):
                results[member] = piece.view(self.gathered[member])

    def home(self, results: list[Any]) -> list[Any]:
        """Bring results back to the device that each leaf came from."""
        if self.devices is None:
            return results
        return [result.to(device) for result, device in zip(results, self.devices, strict=True)]


def split_copy(data: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """Split a tensor into contiguous tensors that own their memory."""
    pieces: list[torch.Tensor] = torch.ops.aten.split_with_sizes_copy.default(data, sizes, dim)
    return pieces


_layouts: dict[tuple[Any, ...], Layout] = {}


def layout_of(leaves: Sequence[torch.Tensor], skeleton: Skeleton, device: torch.device, world_size: int) -> Layout:
    """Return the layout of a nest that `flatten` took apart.

    Args:
        leaves: Its tensors.
        skeleton: Its containers.
        device: Where the buffer is.
        world_size: Number of ranks, for the shapes after a gather.
    """
    key = (skeleton, tuple([(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]), device, world_size)
    layout = _layouts.get(key)
    if layout is None:
        if len(_layouts) >= _REMEMBERED:
            _layouts.pop(next(iter(_layouts)))
        layout = _layouts[key] = _lay_out(leaves, skeleton, device, world_size)
    return layout


def _lay_out(leaves: Sequence[torch.Tensor], skeleton: Skeleton, device: torch.device, world_size: int) -> Layout:
    alone = tuple(place for place, leaf in enumerate(leaves) if leaf.nbytes >= _ALONE)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if place not in alone:
            by_dtype.setdefault(leaf.dtype, []).append(place)
    blocks, start = [], 0
    for dtype, members in by_dtype.items():
        sizes = tuple(leaves[member].numel() for member in members)
        stop = start + sum(sizes) * dtype.itemsize
        blocks.append(Block(dtype, tuple(members), sizes, start, stop))
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
    shapes = tuple(leaf.shape for leaf in leaves)
    text = skeleton_text(skeleton) + "|" + ";".join(f"{leaf.dtype}{tuple(leaf.shape)}" for leaf in leaves)
    return Layout(
        blocks=tuple(blocks),
        alone=alone,
        nbytes=start,
        shapes=shapes,
        digest=digest_of(text),
        devices=None if all(leaf.device == device for leaf in leaves) else tuple(leaf.device for leaf in leaves),
        gathered=tuple((world_size * (shape[0] if shape else 1), *shape[1:]) for shape in shapes),
    )
