"""Which number format a run computes in."""

from __future__ import annotations

from collections.abc import Sequence

from accel_core.errors import DeviceUnavailableError
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler
from accel_core.precision.autocast import AutocastPrecision
from accel_core.precision.fp8 import backend
from accel_core.precision.precision import Precision
from accel_core.process.world import World


def choose(
    name: str,
    world: World,
    autocast: AutocastKwargs,
    scaler: GradScalerKwargs,
    fp8_recipes: Sequence[KwargsHandler] = (),
) -> Precision:
    """Return the number format called `name` on this world's hardware.

    Raises:
        DeviceUnavailableError: The hardware does not compute in that format.
    """
    if name == "no":
        return Precision(autocast=autocast)
    if name == "fp8":
        return backend.choose(world.device, list(fp8_recipes), autocast)
    hardware = world.hardware
    able = hardware.supports_fp16 if name == "fp16" else hardware.supports_bf16()
    if not able:
        other = "bf16" if name == "fp16" else "fp16"
        raise DeviceUnavailableError(
            f"{world.device} does not support every precision; got mixed_precision={name!r}. Use "
            f"mixed_precision={other!r} or 'no'."
        )
    if name == "bf16":
        hardware.configure_bf16()  # before the device is first used
    return AutocastPrecision(name, world.device, autocast, scaler, scale=hardware.has_scaler)
