"""Models that carry adapters of the peft library."""

from __future__ import annotations

import sys

from torch import nn

from accel_core.modules.unwrap import extract_model_from_parallel

__all__ = ["is_peft_model"]


def is_peft_model(model: nn.Module) -> bool:
    """Tell whether a model, under whatever wraps it for training, is a peft model.

    A model can only be one where peft has been imported, so peft is never imported for the question.

    Args:
        model: A model, possibly wrapped for data parallelism or compiled.
    """
    peft = sys.modules.get("peft")
    kind = getattr(peft, "PeftModel", None)
    return kind is not None and isinstance(extract_model_from_parallel(model, keep_torch_compile=False), kind)
