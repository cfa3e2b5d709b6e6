"""fp8 training through MS-AMP. Never run on hardware: the library needs an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import torch

from accel_core.errors import PreparationError
from accel_core.options.engines import engines
from accel_core.options.enums import FP8BackendType
from accel_core.plugins.fp8 import MSAMPRecipeKwargs
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accel_core.precision.autocast import AutocastPrecision


class MsampPrecision(AutocastPrecision):
    """8-bit gradients and optimizer states through MS-AMP, bf16 forward passes. Never run on hardware."""

    def __init__(self, device: torch.device, recipe: MSAMPRecipeKwargs, handler: AutocastKwargs) -> None:
        engines()["fp8-msamp"].require()
        super().__init__("fp8", device, handler, GradScalerKwargs())
        self.fp8_backend = FP8BackendType.MSAMP
        self.recipe = recipe

    def convert_together(self, models: list[Any], optimizers: list[Any]) -> tuple[list[Any], list[Any]]:
        """Convert exactly one model and its optimizer together (`msamp.initialize`)."""
        if not models and not optimizers:
            return models, optimizers
        if len(models) != 1 or len(optimizers) != 1:
            raise PreparationError(
                f"MS-AMP prepares one model together with its optimizer; got {len(models)} models and "
                f"{len(optimizers)} optimizers. Call accelerator.prepare(model, optimizer)."
            )
        import msamp

        model, optimizer = msamp.initialize(models[0], optimizers[0], opt_level=self.recipe.opt_level)
        return [model], [optimizer]
