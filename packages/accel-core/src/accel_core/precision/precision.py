"""Full precision: the base of all number formats, which changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from accel_core.options.enums import FP8BackendType
from accel_core.plugins.handlers import AutocastKwargs
from accel_core.precision import scaler as scalers

_M = TypeVar("_M", bound=torch.nn.Module)


class Precision:
    """How a run computes its forward pass. This one computes as the model was written.

    Called in this order: `convert_together` once for the models and optimizers of a `prepare`, `convert` once for each
    model before it is moved, `wrap` once after it is on its device, `autocast` around each piece of code that asks for
    it, `unscale` before gradients of a finished window are looked at.

    Attributes:
        name: The word that users chose: `no`, `fp16`, `bf16` or `fp8`.
        scaler: The gradient scaler of fp16 training, or `None`.
        native_amp: Whether torch's autocast does the work.
        autocast_arguments: Arguments of `torch.autocast`.
        fp8_backend: The library behind fp8; `NO` for all other formats.
    """

    fp8_backend = FP8BackendType.NO

    def __init__(self, name: str = "no", autocast: AutocastKwargs | None = None) -> None:
        self.name = name
        self.scaler: torch.amp.GradScaler | None = None
        self.native_amp = False
        self.autocast_arguments = autocast or AutocastKwargs()

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return a context in which operations choose their own precision."""
        return nullcontext()

    def convert_together(self, models: list[Any], optimizers: list[Any]) -> tuple[list[Any], list[Any]]:
        """Convert models and optimizers that this precision has to convert together; most precisions change nothing."""
        return models, optimizers

    def convert(self, model: _M) -> _M:
        """Replace layers of a model by those of this precision, in place."""
        return model

    def wrap(self, model: _M) -> _M:
        """Make `model.forward` compute in this precision; a second call changes nothing."""
        return model

    def unscale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Divide the gradients by the loss scale of fp16 training, once per window; without a scaler, do nothing."""
        if self.scaler is not None:
            scalers.unscale(self.scaler, optimizers)
