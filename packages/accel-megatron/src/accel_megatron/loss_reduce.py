"""Losses and outputs over the ranks that read different data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from accel_core.comm.tree import recursively_apply
from accel_megatron import library


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average losses over the data-parallel group; every rank of the group calls it."""
    group = library.core("parallel_state").get_data_parallel_group()
    mean = torch.cat([loss.detach().clone().view(1) for loss in losses])
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: object) -> Any:
    """Concatenate the tensors of the data-parallel group along their first dim; every rank of the group calls it."""
    group = library.core("parallel_state").get_data_parallel_group()

    def gathered(value: torch.Tensor) -> torch.Tensor:
        rows = (value[None] if value.ndim == 0 else value).contiguous()
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows, group=group)
        return torch.cat(parts)

    return recursively_apply(gathered, tensor)
