"""Keys and values of all ranks, by collectives through which gradients flow back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accel_core._torch import all_gather_single, reduce_scatter_single
from accel_parallel.context.order import in_order


class _Gather(torch.autograd.Function):
    """Each rank's keys and values on all ranks, with one collective forward and one backward."""

    @staticmethod
    # `torch.distributed.nn` has such functions; over gloo, gradients that are not contiguous come out wrong.
    def forward(
        ctx: Any, group: dist.ProcessGroup, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.group, ctx.shapes, ctx.dtype = group, (key.shape, value.shape), key.dtype
        packed = torch.cat([key.reshape(-1), value.reshape(-1)])
        gathered = packed.new_empty(group.size() * packed.numel())
        all_gather_single(gathered, packed, group=group)
        keys, values = torch.split(gathered.view(group.size(), -1), [key.numel(), value.numel()], 1)
        return keys.reshape(-1, *key.shape), values.reshape(-1, *value.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        of_keys, of_values = gradients
        size = ctx.group.size()
        # Each rank's part is the sum of what all ranks have for it; sums of half precision lose what they add up.
        packed = torch.cat([of_keys.reshape(size, -1), of_values.reshape(size, -1)], 1)
        packed = packed if packed.dtype == torch.float64 else packed.float()
        own = packed.new_empty(packed.shape[1])
        reduce_scatter_single(own, packed.view(-1), group=ctx.group)
        key_shape, value_shape = ctx.shapes
        key, value = torch.split(own.to(ctx.dtype), [key_shape.numel(), value_shape.numel()])
        return None, key.view(key_shape), value.view(value_shape)


def gather_keys_and_values(
    group: dist.ProcessGroup, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the whole sequence, in its order."""
    keys, values = _Gather.apply(group, key, value)  # type: ignore[no-untyped-call]
    return in_order(keys.unbind(), -2), in_order(values.unbind(), -2)


def gather_whole(group: dist.ProcessGroup, part: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor of data with the whole sequence along a dim, in its order; without gradients."""
    with torch.no_grad():
        sent = part.contiguous()
        sent = sent.to(torch.uint8) if sent.dtype == torch.bool else sent
        gathered = sent.new_empty((group.size(), *sent.shape))
        all_gather_single(gathered.view(-1), sent.view(-1), group=group)
        return in_order(gathered.unbind(), dim).to(part.dtype)
