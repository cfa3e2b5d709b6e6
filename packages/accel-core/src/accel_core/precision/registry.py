"""Which number format a run computes in."""

from __future__ import annotations

from accel_core.errors import DeviceUnavailableError
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accel_core.precision.autocast import AutocastPrecision
from accel_core.precision.precision import Precision
from accel_core.process.world import World

__all__ = ["choose"]


def choose(name: str, world: World, autocast: AutocastKwargs, scaler: GradScalerKwargs) -> Precision:
    """Return the number format called `name` on this world's hardware.

    Args:
        name: `no`, `fp16` or `bf16`.
        world: The processes, for their device.
        autocast: Arguments of `torch.autocast`.
        scaler: Arguments of the gradient scaler.

    Raises:
        DeviceUnavailableError: The hardware does not compute in that format.
    """
    if name == "no":
        return Precision()
    hardware = world.hardware
    able = hardware.supports_fp16 if name == "fp16" else hardware.supports_bf16()
    if not able:
        other = "bf16" if name == "fp16" else "fp16"
        raise DeviceUnavailableError(
            f"Mixed precision {name!r} was asked for, and {world.device} does not train in it. "
            f"Use mixed_precision={other!r} or 'no'."
        )
    return AutocastPrecision(name, world.device, autocast, scaler, scale=hardware.has_scaler)
