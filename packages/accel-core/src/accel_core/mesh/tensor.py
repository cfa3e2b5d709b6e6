"""Tensors that are spread over a device mesh."""

from __future__ import annotations

import sys

import torch

__all__ = ["placed_like"]


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
