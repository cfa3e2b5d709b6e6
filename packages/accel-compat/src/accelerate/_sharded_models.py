"""Whether and how a model is spread over a device mesh, as Accelerate asks it."""

from __future__ import annotations

import sys

import torch


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether any parameter of `model` is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    # Not imported, it made no tensor.
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return the tensor-parallel size that a model was loaded with, or `None` where it was not."""
    size = getattr(model, "tp_size", None)
    if size is None:
        size = getattr(model, "_tp_size", None)  # transformers has had both names
    return None if size is None else int(size)
