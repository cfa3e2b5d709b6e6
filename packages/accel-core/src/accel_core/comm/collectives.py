"""Nests of tensors across ranks: gather, reduce, broadcast.

Each operation packs a whole nest into one buffer and opens with one frame (see `transport`), so its cost hardly depends
on how many tensors the nest holds, and ranks that bring different nests get an error on every rank. With one process
every operation gives back what it got.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_core.comm.packing import Layout, lay_out
from accel_core.comm.transport import Message, Transport, check_rank, participate
from accel_core.comm.tree import flatten, leaf_paths, recursively_apply, unflatten, view_of
from accel_core.errors import CollectiveError, ConfigurationError
from accel_core.process.world import World, ensure

Nest = TypeVar("Nest")

_REDUCTIONS = ("mean", "sum", "max", "none")
_INTEGERS_OF_GLOO = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})


def gather(tensor: Nest) -> Nest:
    """Gather a nest of tensors from all ranks and concatenate along the first dim.

    Args:
        tensor: A nest of tensors, each of the same shape and dtype on all ranks. A tensor without dims counts as one of
            shape `(1,)`.

    Returns:
        The nest with tensors of shape `(ranks * n, ...)`, rank 0 first, on the device they came from and without
        gradient. With one process, `tensor` itself.

    Raises:
        RankDisagreementError: Structure, shapes or dtypes differ between ranks; pad_across_processes makes sizes
            equal.
        UnsupportedTypeError: A leaf is not a tensor; the other ranks get RemoteRankError.

    Examples:
        >>> gather(torch.tensor([accelerator.process_index]))  # with four processes: tensor([0, 1, 2, 3])
        tensor([0])
    """
    world = ensure()
    if world.size == 1:
        return tensor
    return _gather(tensor, world)


@torch.no_grad()
def _gather(nest: Nest, world: World) -> Nest:
    with participate(world, "gather") as transport:
        leaves, layout = lay_out(nest, "gather", transport.device, world.size)
        # Packed straight into the frame where it fits: then the frame is the only collective of the operation. What is
        # packed may be wrong until the headers were compared, which is why nothing is taken out before `exchange`.
        fits = layout.nbytes <= transport.capacity
        if fits:
            layout.pack(leaves, transport.payload)
        transport.exchange(Message(layout.digest, layout.nbytes, lambda: view_of(nest)))
        results: list[Any] = [None] * len(leaves)
        if fits:
            layout.unpack_rows(transport.rows(0, layout.nbytes), results)
        else:
            packed = _packed(layout, leaves, transport)
            layout.unpack_rows(transport.all_gather(packed).view(world.size, -1), results)
        for place in layout.alone:
            single = _dense(leaves[place], transport).reshape(-1).view(torch.uint8)
            results[place] = transport.all_gather(single).view(leaves[place].dtype).view(layout.gathered[place])
        found: Nest = unflatten(nest, iter(layout.restore(results)))
        return found


def reduce(tensor: Nest, reduction: str = "mean", scale: float = 1.0) -> Nest:
    """Combine a nest of tensors over all ranks, place by place.

    Args:
        tensor: A nest of tensors, each of the same shape and dtype on all ranks.
        reduction: `"sum"`, also under the name of `"none"`; `"mean"`, the sum divided by the number of ranks; `"max"`,
            which is NaN where any rank has NaN.
        scale: Factor for the result on XLA devices; elsewhere it has no effect.

    Returns:
        A nest of new tensors, the same on all ranks, without gradient. Boolean tensors are combined by "or". With one
        process, a copy.

    Raises:
        CollectiveError: The mean of whole numbers or booleans, or the largest of complex numbers, was asked for.
        ConfigurationError: The reduction is unknown.
        RankDisagreementError: Structure, shapes or dtypes differ between ranks.
        UnsupportedTypeError: A leaf is not a tensor; the other ranks get RemoteRankError.

    Examples:
        >>> reduce({"loss": torch.tensor(0.5)}, "mean")
        {'loss': tensor(0.5000)}
    """
    world = ensure()
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(f"Unknown reduction; got {reduction!r}. Use one of {', '.join(_REDUCTIONS)}.")
    if world.size == 1:
        flatten(tensor, "reduce")
        # A copy, as from several ranks: what is done to the result does not reach the input.
        copied: Nest = recursively_apply(torch.clone, tensor)
        return copied
    return _reduce(tensor, reduction, scale, world)


@torch.no_grad()
def _reduce(nest: Nest, reduction: str, scale: float, world: World) -> Nest:
    operation = f"reduce({reduction})"
    with participate(world, operation) as transport:
        leaves, layout = lay_out(nest, "reduce", transport.device, world.size)
        _check_reduction(nest, reduction)
        in_frame = transport.on_host and layout.nbytes <= transport.capacity
        if in_frame:
            layout.pack(leaves, transport.payload)
        # Reading headers off a device waits for all that was queued on it. A reduction that all ranks were seen to
        # agree on is therefore sent without a frame there; ranks that part ways later are found in debug mode alone.
        proof = (operation, layout.digest)
        if transport.on_host or world.debug or proof not in transport.proven:
            transport.exchange(Message(layout.digest, layout.nbytes, lambda: view_of(nest)))
            transport.proven.add(proof)
        factor = scale if world.device.type == "xla" else 1.0
        results: list[Any] = [None] * len(leaves)
        packed = None if in_frame else _packed(layout, leaves, transport)
        for segment in layout.segments:
            if packed is None:
                total = _reduce_rows(transport.rows(segment.start, segment.stop).view(segment.dtype), reduction)
            else:
                total = _all_reduce(packed[segment.start : segment.stop].view(segment.dtype), reduction, transport)
            layout.unpack(segment, total if factor == 1.0 else total * factor, results)
        for place in layout.alone:
            total = _all_reduce(_dense(leaves[place], transport).clone(), reduction, transport)
            results[place] = total if factor == 1.0 else total * factor
        found: Nest = unflatten(nest, iter(layout.restore(results)))
        return found


def _check_reduction(nest: object, reduction: str) -> None:
    """Refuse a mean of whole numbers, and the largest of complex ones."""
    if reduction not in ("mean", "max"):
        return
    for path, leaf in leaf_paths(nest):
        dtype = leaf.dtype
        if reduction == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            raise CollectiveError(
                f"Whole numbers and booleans have no mean of their own dtype; got {dtype}"
                f"{f' at {path}' if path else ''}. Use reduction='sum', or call .float() on it first."
            )
        if reduction == "max" and (dtype.is_complex or dtype is torch.uint64):
            raise CollectiveError(
                f"The largest of complex numbers, and of uint64, is not defined here; got {dtype}"
                f"{f' at {path}' if path else ''}. Reduce its .abs(), or convert it to int64."
            )


def _reduce_rows(rows: torch.Tensor, reduction: str) -> torch.Tensor:
    """Combine `(ranks, n)` over the ranks, in the order of ranks, so that all get the same bits."""
    dtype = rows.dtype
    if dtype is torch.bool:
        return rows.any(0)
    if dtype is torch.complex32:
        # torch adds no halves of complex numbers; their parts are added as the floating-point numbers that they are.
        return torch.view_as_complex(_reduce_rows(torch.view_as_real(rows), reduction))
    if not (dtype.is_complex or dtype in (torch.float32, torch.float64)):
        # Sums of few digits, and dtypes that torch can store and not compare, are computed in wider ones.
        rows = rows.to(torch.float32 if dtype.is_floating_point else torch.int64)
    if reduction == "max":
        return rows.amax(0).to(dtype)
    total = rows.sum(0)
    return (total.div_(len(rows)) if reduction == "mean" else total).to(dtype)


def _all_reduce(data: torch.Tensor, reduction: str, transport: Transport) -> torch.Tensor:
    """Combine a contiguous tensor, which may be overwritten, over the ranks."""
    dtype = data.dtype
    if dtype is torch.bool:
        transport.all_reduce(data.view(torch.uint8), dist.ReduceOp.MAX)
        return data
    wire = data
    if dtype.is_complex:
        wire = torch.view_as_real(data)
    elif dtype.is_floating_point and dtype.itemsize == 1:
        wire = data.to(torch.float32)
    elif not dtype.is_floating_point and dtype not in _INTEGERS_OF_GLOO:
        wire = data.to(torch.int64)
    if reduction == "max":
        _all_reduce_max(wire, transport)
    else:
        transport.all_reduce(wire)
    if reduction == "mean":
        wire.div_(transport.world.size)
    return data if dtype.is_complex else wire.to(dtype)


def _all_reduce_max(wire: torch.Tensor, transport: Transport) -> None:
    """Take the largest over the ranks, in place."""
    if not wire.dtype.is_floating_point:
        transport.all_reduce(wire, dist.ReduceOp.MAX)
        return
    # Backends compare with `<`, in which a NaN wins or loses by its place: it travels apart.
    unknown = wire.isnan().view(torch.uint8)
    transport.all_reduce(wire, dist.ReduceOp.MAX)
    transport.all_reduce(unknown, dist.ReduceOp.MAX)
    wire[unknown.view(torch.bool)] = torch.nan


def _dense(leaf: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return a tensor whose memory holds its values one after the other, where operations take it from."""
    # A conjugated or negated tensor shares the memory of another and carries a flag; its bytes are not its values.
    return leaf.to(transport.device).resolve_conj().resolve_neg().contiguous()


def broadcast(tensor: Nest, from_process: int = 0) -> Nest:
    """Give every rank the tensors of one rank.

    Args:
        tensor: A nest of tensors of the same structure, shapes and dtypes on all ranks. The tensors of the other ranks
            are overwritten.
        from_process: The rank whose values win.

    Returns:
        `tensor`.

    Raises:
        CollectiveError: A tensor of another rank cannot be written to; the other ranks get RemoteRankError.
        ConfigurationError: There is no such rank.
        RankDisagreementError: Structure, shapes, dtypes or `from_process` differ between ranks.
        UnsupportedTypeError: A leaf is not a tensor; the other ranks get RemoteRankError.

    Examples:
        >>> drawn = torch.rand(4)  # differs between processes
        >>> drawn = broadcast(drawn)  # that of process 0 on all of them
    """
    world = ensure()
    if world.size > 1:
        _broadcast(tensor, from_process, world)
    return tensor


@torch.no_grad()
def _broadcast(nest: object, source: int, world: World) -> None:
    with participate(world, f"broadcast(from_process={source})") as transport:
        check_rank(source, world.size)
        leaves, layout = lay_out(nest, "broadcast", transport.device, world.size)
        fits = layout.nbytes <= transport.capacity
        if fits and world.rank == source:
            layout.pack(leaves, transport.payload)
        transport.exchange(Message(layout.digest, layout.nbytes, lambda: view_of(nest)))
        if fits:
            packed = transport.rows(0, layout.nbytes)[source]
        else:
            packed = _packed(layout, leaves, transport)
            transport.broadcast(packed, source)
        if world.rank != source:
            received: list[Any] = [None] * len(leaves)
            for segment in layout.segments:
                layout.unpack(segment, packed[segment.start : segment.stop].view(segment.dtype), received)
            for leaf, value in zip(leaves, received, strict=True):
                if value is not None:
                    leaf.copy_(value)
        for place in layout.alone:
            single = _dense(leaves[place], transport)
            transport.broadcast(single.reshape(-1).view(torch.uint8), source)
            if world.rank != source:
                leaves[place].copy_(single)


def _packed(layout: Layout, leaves: list[torch.Tensor], transport: Transport) -> torch.Tensor:
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=transport.device)
    layout.pack(leaves, buffer)
    return buffer
