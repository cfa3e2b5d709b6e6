"""The gradient scaler of fp16 for ranks that hold parts of gradients, the whole, or both."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_core._torch import unscale_and_check_
from accel_core.precision.precision import Precision
from accel_core.process.world import World
from accel_core.strategies.parts import PrecisionRequest
from accel_parallel.averaging import alike
from accel_parallel.sharding.gradients import shards_of


def together(precision: Precision, asked: PrecisionRequest, world: World) -> Precision:
    """Make all ranks skip a step, or none, where a number format has a gradient scaler."""
    if precision.scaler is not None:
        precision.scaler = SpreadGradScaler(world.device.type, **asked.scaler.to_kwargs())
    return precision


class SpreadGradScaler(torch.amp.GradScaler):
    """Lets all ranks skip a step, or none."""

    process_group = None  # the default one; by this name of torch, `unscale` knows that it exchanges

    # torch's own cannot unscale parts and whole tensors together, and a rank that alone overflowed would skip alone.
    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale what this rank holds, and find out whether any rank holds an overflow; every rank calls it."""
        kinds = alike(shards_of(parameter for group in optimizer.param_groups for parameter in group["params"]))
        if not allow_fp16 and any(first.dtype is torch.float16 for first, *_ in kinds):
            raise ValueError("Attempting to unscale FP16 gradients.")  # torch's own words, which users look for
        for gradients in kinds:
            device = gradients[0].device
            here = found_inf.to(device)  # the kernel wants it there
            unscale_and_check_(gradients, here, inv_scale.to(device))
            found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device)))
        if dist.is_initialized():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
