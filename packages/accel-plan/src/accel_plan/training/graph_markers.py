"""What tells an engine when modules read parameters and when backward passes reach them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Watched", "linear", "mapped", "mark"]


class Watched(dict[str, nn.Parameter | None]):
    """The parameters of a module, which tell when one is read."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], asked: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._asked(parameter)
        return parameter


class _Mark(torch.autograd.Function):
    """Calls a function when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
        ctx.reached = reached
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.reached()
        return *gradients, None


def mark(tensor: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
    """Return a view of a tensor at which a function is called when the backward pass comes by."""
    found: torch.Tensor = _Mark.apply(tensor, reached)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    """A matrix product that keeps the weight itself for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, bias)
        if rows.dim() == 2 and bias is not None:
            return torch.addmm(bias, rows, weight.t())
        product = rows.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight, bias = ctx.saved_tensors
        of_rows = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = flat.t().matmul(rows.reshape(-1, rows.shape[-1])) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return of_rows, of_weight, of_bias


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a weight as `torch.nn.functional.linear` does, and keep no view of it for the backward pass."""
    found: torch.Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return found


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a value with each tensor in it replaced; a dictionary is changed in place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = mapped(function, value[key])
    if isinstance(value, (tuple, list)):
        found = [mapped(function, each) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value
