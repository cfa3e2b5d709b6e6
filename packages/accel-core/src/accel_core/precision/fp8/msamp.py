"""fp8 training through MS-AMP. Never run on hardware: the library needs an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

from accel_core.errors import PreparationError
from accel_core.options.enums import FP8BackendType
from accel_core.precision.autocast import Fp8Precision


class MsampPrecision(Fp8Precision):
    """8-bit gradients and optimizer states through MS-AMP, bf16 forward passes. Never run on hardware."""

    fp8_backend = FP8BackendType.MSAMP

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
