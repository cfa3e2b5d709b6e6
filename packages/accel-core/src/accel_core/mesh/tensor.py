"""Tensors that are spread over a device mesh."""

from __future__ import annotations

import sys

import torch

__all__ = ["get_model_tp_size", "model_has_dtensor", "placed_like"]


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether any parameter of `model` is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return the tensor-parallel size that a model was loaded with, or `None` where it was not.

    Args:
        model: A model of transformers loaded with `tp_plan`, for example.
    """
    size = getattr(model, "tp_size", None)
    if size is None:
        size = getattr(model, "_tp_size", None)
    return None if size is None else int(size)


def placed_like(value: object, parameter: torch.Tensor) -> object:
    """Return a value of an optimizer's state where, and sharded as, the parameter is that it belongs to.

    Args:
        value: A tensor, whole and equal on all ranks; one of another shape than the parameter's (a step count) and
            what is no tensor come back as they are.
        parameter: The parameter; a `DTensor` where it is sharded.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(parameter, module.DTensor) or isinstance(value, module.DTensor):
        return value.to(parameter.device)
    # Every rank has the whole value, so each keeps its own shard and nothing is sent.
    return module.distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
