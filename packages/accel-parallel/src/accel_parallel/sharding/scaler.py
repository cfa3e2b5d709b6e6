"""The gradient scaler of fp16 for ranks that hold parts of gradients, the whole, or both."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_core._torch import unscale_and_check_
from accel_core.mesh.tensor import local_part
from accel_core.precision.precision import Precision
from accel_core.process.world import World
from accel_core.strategies.parts import PrecisionRequest


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
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = local_part(parameter.grad)
                    by_kind.setdefault((own.device, own.dtype), []).append(own)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype in by_kind):
            raise ValueError("Attempting to unscale FP16 gradients.")  # torch's own words, which users look for
        for (device, _), gradients in by_kind.items():
            here = found_inf.to(device)  # the kernel wants it on the device of the gradients
            unscale_and_check_(gradients, here, inv_scale.to(device))
            found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device)))
        if dist.is_initialized():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
