"""Norms and clipping of gradients that are sharded, each on its own mesh, or whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["clip_norm", "clip_value", "local"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_norm(parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients down to a common norm of `max_norm` at most.

    Args:
        parameters: Parameters whose gradients are sharded over any meshes, or whole and equal on all ranks.
        max_norm: Largest norm.
        norm_type: Which p-norm.

    Returns:
        The norm before: a plain scalar, the same on all ranks.
    """
    gradients = _gradients(parameters)
    norm = _total_norm(gradients, float(norm_type))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in map(local, gradients):
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), own in by_kind.items():
        torch._foreach_mul_(own, factor.to(device))
    return norm


@torch.no_grad()
def clip_value(parameters: Iterable[torch.Tensor] | torch.Tensor, limit: float) -> None:
    """Clip each element of the gradients to [-limit, limit]."""
    for gradient in map(local, _gradients(parameters)):
        gradient.clamp_(-limit, limit)


def _gradients(parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    unique = {id(parameter): parameter for parameter in given}
    return [parameter.grad for parameter in unique.values() if parameter.grad is not None]


def _total_norm(gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    """Return the p-norm of all gradients together: one sum over ranks for each way in which some are sharded."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        spread = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        groups.setdefault(spread, []).append(gradient)
    norms = [_norm_of(group, spread, p) for spread, group in groups.items()]
    if len(norms) == 1:
        return norms[0]
    return torch.nn.utils.get_total_norm([norm.to(norms[0]) for norm in norms], p) if norms else torch.zeros(())


def _norm_of(gradients: list[torch.Tensor], spread: Any, p: float) -> torch.Tensor:
    shards = [shard for gradient in gradients if (shard := local(gradient)).numel()]
    first = gradients[0]
    norm = torch.nn.utils.get_total_norm(shards, p) if shards else torch.zeros((), dtype=first.dtype)
    norm = norm.to(first.device)
    if spread is None:
        return norm
    mesh, placements = spread
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    if not math.isinf(p):
        norm = norm.pow(p)
    for axis in axes:
        dist.all_reduce(norm, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=mesh.get_group(axis))
    return norm if math.isinf(p) else norm.pow(1.0 / p)
