"""Tensors of which a rank holds a run of elements, as FSDP1 leaves those that it flattens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FlatPart", "boxes"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins, and its size."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up a contiguous range of a tensor's elements, in the order of the elements.

    >>> list(boxes((4, 3), 2, 11))
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, end = -(-start // row), stop // row
    if first > end:  # all of it in the middle of one row
        yield from _in_row(shape, end, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if end > first:
        yield (first, *(0 for _ in shape[1:])), (end - first, *shape[1:])
    yield from _in_row(shape, end, end * row, stop)


def _in_row(shape: Sequence[int], number: int, start: int, stop: int) -> Iterator[Box]:
    skipped = number * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - skipped, stop - skipped):
        yield (number, *offsets), (1, *sizes)


class FlatPart(Tensor):
    """Stands for a tensor of which this rank holds a run of elements: it has the shape of the whole.

    torch's planners of checkpoints ask it what to write. It cannot be computed with.
    """

    run: Tensor  # the elements that this rank holds, in one dimension; none are a run too
    lengths: tuple[int, ...]  # how many elements each rank holds that has a part of it, one after the other
    place: int  # which of these ranks this one is

    @staticmethod
    def __new__(cls, run: Tensor, shape: Sequence[int], lengths: Sequence[int], place: int) -> FlatPart:
        """Make what stands for the whole, which has a given shape."""
        made: FlatPart = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=run.dtype, device=run.device)
        made.run, made.lengths, made.place = run.detach(), tuple(lengths), place
        return made

    @property
    def start(self) -> int:
        """Which element the run begins with."""
        return sum(self.lengths[: self.place])

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> Any:
        """Refuse to compute."""
        raise NotImplementedError(f"A part of a flattened tensor cannot be computed with; got {func}.")

    def with_run(self, run: Tensor) -> FlatPart:
        """Return the same part of another tensor of this shape, over other memory."""
        return FlatPart(run, self.shape, self.lengths, self.place)

    def part_of(self, whole: Tensor) -> FlatPart:
        """Return the same part of a whole tensor of this shape."""
        taken = whole.detach().reshape(-1)[self.start : self.start + self.run.numel()]
        return self.with_run(taken.to(self.device, copy=True))

    def parts(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes that this rank holds, each with its memory."""
        done = 0
        for box in boxes(self.shape, self.start, self.start + self.run.numel()):
            count = math.prod(box[1])
            yield box, self.run[done : done + count].view(box[1])
            done += count

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        """Return what torch's planner of saves asks for."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        found = []
        for (offsets, sizes), _memory in self.parts():
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.run), self.shape)
            found.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return found

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the memory of the box that begins where torch's planner says."""
        return next(memory for (offsets, _), memory in self.parts() if offsets == tuple(index.offset))
