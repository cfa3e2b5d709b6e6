"""Tensors that are spread over a device mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_T = TypeVar("_T")
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins, and its size."""


def is_spread(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a tensor of which this rank holds its part only: a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever made one has imported it
    return module is not None and isinstance(value, module.DTensor)


def is_exchanged(value: object) -> bool:
    """Return whether torch changes a parameter by exchange in place, which it refuses while there are weak references.

    So it is with values that are spread over ranks, and with packed weights made of other tensors.
    """
    return is_spread(value) or hasattr(value, "__tensor_flatten__")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank holds of a tensor: the tensor itself where it is not spread."""
    return tensor.to_local() if is_spread(tensor) else tensor


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank holds, outside of autograd: `local_part` without the view that it makes."""
    return tensor._local_tensor if is_spread(tensor) else local_part(tensor)


def local_parts(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of the whole tensor that this rank holds, with their memory; of one not spread, all of it."""
    if is_spread(tensor):
        if tensor.device_mesh.get_coordinate() is None:
            return
        # What torch's own planners ask; a tensor on a mesh has one part on each rank of it.
        (part,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        yield (tuple(part.offsets), tuple(part.sizes)), local_part(tensor)
    else:
        yield ((0,) * tensor.dim(), tuple(tensor.shape)), tensor


def spread_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether this rank holds the same part of two tensors of one shape."""
    if is_spread(one) and is_spread(other):
        return (one.device_mesh, one.placements) == (other.device_mesh, other.placements)
    return not is_spread(one) and not is_spread(other)


def empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without values, of another dtype, that is spread as `tensor` is."""
    return torch.empty_like(tensor.detach(), dtype=dtype)


def whole(value: _T) -> _T:
    """Return a tensor whole; every rank of its mesh calls it. Anything that is on no mesh comes back as it is.

    A mesh of one rank of several has their group as `among`: all of these ranks call it.
    """
    if not is_spread(value):
        return value
    spread: Any = value
    among = getattr(spread.device_mesh, "among", None)
    if among is not None:
        part, held = spread.to_local().detach(), spread.device_mesh.get_coordinate() is not None
        found = part.contiguous() if held else part.new_empty(spread.shape)
        torch.distributed.broadcast(found, int(spread.device_mesh.mesh), group=among)
        return found  # type: ignore[no-any-return]
    if spread.device_mesh.ndim > 1 and type(spread.placements[0]).__name__ == "_StridedShard":
        # What was cut last is put together first; asked for both at once, torch warns of the two steps.
        replicate = sys.modules["torch.distributed.tensor"].Replicate()
        spread = spread.redistribute(placements=[replicate, *spread.placements[1:]])
    return spread.full_tensor()  # type: ignore[no-any-return]


def whole_on_first(value: DTensor) -> torch.Tensor:
    """Return a spread tensor whole on rank 0, and on the others their part; every rank calls it."""
    mesh, placements = value.device_mesh, cast(tuple[Any, ...], value.placements)
    copied = all(each.is_replicate() for each in placements[:-1])
    if mesh.device_type != "cpu" or not copied or type(placements[-1]).__name__ != "Shard" or 0 not in mesh.mesh:
        return whole(value)
    # On a CPU each part is sent to rank 0 from where it lies, so the others need no memory for the whole.
    dist = torch.distributed
    part, rank, size = local_part(value).detach().contiguous(), dist.get_rank(), mesh.size(mesh.ndim - 1)
    (holders,) = [row.tolist() for row in mesh.mesh.reshape(-1, size) if 0 in row]
    if rank in holders and rank != 0 and part.numel():
        dist.send(part, 0)
    if rank != 0:
        return part
    found = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    # Not strict: a dim shorter than the mesh leaves the last ranks without a piece.
    for piece, holder in zip(found.chunk(size, placements[-1].dim), holders, strict=False):
        if holder == 0:
            piece.copy_(part)
        elif piece.numel():
            arrived = piece if piece.is_contiguous() else torch.empty_like(piece, memory_format=torch.contiguous_format)
            dist.recv(arrived, holder)
            if arrived is not piece:
                piece.copy_(arrived)
    return found


def spread_like(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a tensor, whole and equal on all ranks, spread as `like` is; nothing is sent.

    It goes where `like` is, or stays where it is while that has no memory yet.
    """
    module = sys.modules["torch.distributed.tensor"]
    mesh = like.device_mesh
    # Unchecked, as values are equal on all ranks: the check would broadcast them.
    everywhere = module.DTensor.from_local(
        value if like.is_meta else value.to(like.device), mesh, [module.Replicate()] * mesh.ndim, run_check=False
    )
    spread: torch.Tensor = everywhere.redistribute(placements=like.placements)
    return spread


def spread_over(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what ranks hold of a tensor as one that is spread as `like` is; nothing is sent."""
    if not is_spread(like):
        return part
    spread: Any = like.detach()
    if part.device.type not in ("meta", spread.device_mesh.device_type):  # offloaded: torch would move it to the device
        held = empty_like(like, part.dtype)
        local_memory(held).copy_(part)
        return held
    made: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
        part, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )
    return made


def fill(destination: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into one of the same shape; of one that is spread, each rank fills its part."""
    if is_spread(destination):
        local_part(destination).copy_(local_part(spread_like(value, destination)))
    else:
        destination.copy_(value)


def placed_like(value: object, parameter: torch.Tensor) -> object:
    """Return a value of an optimizer's state where, and sharded as, the parameter is that it belongs to."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    if is_spread(parameter) and not is_spread(value):
        return spread_like(value, parameter)
    return value.to(parameter.device)
