"""Weights that only the first rank has, on their way to the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["has_no_values", "receive"]


def has_no_values(model: nn.Module) -> bool:
    """Return whether a weight or buffer is on the meta device."""
    return any(tensor.is_meta for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


@torch.no_grad()
def receive(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give every rank the values that the first one has, of what is not sharded yet; every rank calls it.

    Args:
        modules: The modules, whose own tensors are meant. Those on the meta device get memory; ties stay.
        device: Where the values go.
    """
    made: dict[int, nn.Parameter] = {}
    sent: set[int] = set()
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter.is_meta:
                if id(parameter) not in made:
                    real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                    real.__dict__.update(parameter.__dict__)
                    made[id(parameter)] = real
                parameter = module._parameters[name] = made[id(parameter)]
            elif parameter.device != device:
                parameter.data = parameter.data.to(device)
            _send(parameter.data, sent)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer
                _send(buffer.data, sent)


def _send(tensor: torch.Tensor, sent: set[int]) -> None:
    if tensor.numel() and tensor.data_ptr() not in sent:
        sent.add(tensor.data_ptr())
        whole = tensor.contiguous()
        dist.broadcast(whole, 0)
        if whole is not tensor:
            tensor.copy_(whole)
