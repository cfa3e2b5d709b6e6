"""Weights that only the first rank has, on their way to the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Empty", "has_no_values", "receive"]


def has_no_values(model: nn.Module) -> bool:
    """Return whether a weight or buffer is on the meta device."""
    return any(tensor.is_meta for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


class Empty:
    """Gives the meta tensors of modules memory without values, module by module; ties stay.

    Args:
        device: Where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def __call__(self, module: nn.Module) -> None:
        """Fill in the module's own tensors."""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in self._made:
                    real = nn.Parameter(torch.empty_like(parameter, device=self._device), parameter.requires_grad)
                    real.__dict__.update(parameter.__dict__)
                    self._made[id(parameter)] = parameter, real
                module._parameters[name] = self._made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=self._device)


@torch.no_grad()
def receive(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give every rank the values that the first one has, of what is not sharded yet; every rank calls it.

    Args:
        modules: The modules, whose own tensors are meant. Those on the meta device get memory; ties stay.
        device: Where the values go.
    """
    empty, sent = Empty(device), set[int]()
    for module in modules:
        empty(module)
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
                _send(parameter.data, sent)
        for buffer in module._buffers.values():
            if buffer is not None:
                buffer.data = buffer.data.to(device)
                _send(buffer.data, sent)


def _send(tensor: torch.Tensor, sent: set[int]) -> None:
    if tensor.numel() and tensor.data_ptr() not in sent:
        sent.add(tensor.data_ptr())
        whole = tensor.contiguous()
        dist.broadcast(whole, 0)
        if whole is not tensor:
            tensor.copy_(whole)
