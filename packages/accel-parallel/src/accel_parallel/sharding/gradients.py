"""Norms and clipping of gradients that are sharded, each on its own mesh, or whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accel_core._torch import foreach_mul_
from accel_core.mesh.tensor import local_part
from accel_parallel.averaging import alike, groups_of

Groups: TypeAlias = tuple[dist.ProcessGroup, ...]
"""Process groups over which something is sharded, one for each axis of a mesh."""


@torch.no_grad()
def clip_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    shared_by: Callable[[torch.Tensor], Groups] | None = None,
    *,
    counted: Iterable[torch.Tensor] | None = None,
    across: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Scale gradients down to a common norm of `max_norm` at most.

    `counted` are those that make up the norm, if these are not all, and `across` joins ranks that hold different ones,
    on a device of theirs.
    """
    unique = list(dict.fromkeys(parameters))  # a tied one counts once
    measured = unique if counted is None else list(dict.fromkeys(counted))
    norm = _total_norm(measured, float(norm_type), shared_by or groups_of)
    if across is not None:
        # Ranks may have gradients in other formats, or none.
        norm = norm.to(device or norm.device, torch.promote_types(norm.dtype, torch.float32))
        norm = _joined(norm, (across,), float(norm_type))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch does, so that norms of zero divide
    for own in alike(shards_of(unique)):
        foreach_mul_(own, factor.to(own[0].device))
    return norm


@torch.no_grad()
def clip_value(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip each element of the gradients to [-limit, limit]."""
    for gradient in shards_of(parameters):
        gradient.clamp_(-limit, limit)


def shards_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of gradients that this rank holds, without empty ones."""
    found = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [shard for shard in found if shard.numel()]  # the infinity norm of nothing is an error


def _total_norm(parameters: list[torch.Tensor], p: float, shared_by: Callable[[torch.Tensor], Groups]) -> torch.Tensor:
    """Return the p-norm of all gradients together: one sum over ranks for each way in which some are sharded."""
    kinds: dict[Groups, list[torch.Tensor]] = {}
    # Asking a mesh for its groups takes longer than the norm of a small gradient.
    known: dict[tuple[int, tuple[object, ...]], Groups] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            place = id(parameter.device_mesh), parameter.placements
            if place not in known:
                known[place] = shared_by(parameter)
            groups = known[place]
        else:
            groups = shared_by(parameter)
        kinds.setdefault(groups, []).append(parameter)
    norms = [_norm_of(own, groups, p) for groups, own in kinds.items()]
    if len(norms) == 1:
        return norms[0]
    return torch.nn.utils.get_total_norm([norm.to(norms[0].device) for norm in norms], p) if norms else torch.zeros(())


def _norm_of(parameters: list[torch.Tensor], groups: Groups, p: float) -> torch.Tensor:
    """Return the norm of gradients that are sharded over the same groups; a rank may hold no part of them."""
    shards = shards_of(parameters)
    norm = torch.nn.utils.get_total_norm(shards, p) if shards else torch.zeros(())
    norm = norm.to(local_part(parameters[0]).device, _format(parameters))
    return _joined(norm, tuple(group for group in groups if group.size() > 1), p)


def _format(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the number format of a norm, which is one on all ranks, whatever part of gradients each of them has."""
    found = {parameter.dtype.to_real() for parameter in parameters if parameter.requires_grad}
    return reduce(torch.promote_types, found) if found else torch.float32


def _joined(norm: torch.Tensor, groups: Groups, p: float) -> torch.Tensor:
    """Return the norm of what ranks of some groups hold together."""
    if not groups:
        return norm
    norm = norm if math.isinf(p) else norm.pow(p)  # powers add up over ranks, norms do not
    for group in groups:
        dist.all_reduce(norm, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)
    return norm if math.isinf(p) else norm.pow(1.0 / p)
