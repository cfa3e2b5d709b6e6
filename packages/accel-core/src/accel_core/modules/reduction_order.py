"""The order in which DDP adds up gradients, which a run that goes on takes over from the run before.

Where more than two ranks add up, a gradient's place in a bucket decides whose is added first, and so its last bits. DDP
places gradients as they came in its first step: a run that begins again would have other places in that step. With
`static_graph` it does so later, in a way that cannot be repeated: the last bits of a run that goes on may then differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_core._torch import ddp_figures, has_gradient_hooks

__all__ = ["ReductionOrders"]


class ReductionOrders:
    """The orders of the models of a run; only those of `DistributedDataParallel` have one."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models

    def state_dict(self) -> dict[str, list[list[int]]]:
        """Return the numbers of each model's parameters in the order of their gradients, where it is known."""
        return {"orders": [_order_of(model) for model in self._models]}

    def load_state_dict(self, state: dict[str, list[list[int]]]) -> None:
        """Have each model take over its order when it trains for the first time."""
        for model, order in zip(self._models, state["orders"], strict=False):
            wrapper = _wrapper_of(model)
            if wrapper is not None and order and not _order_of(model):
                _follow(model, wrapper, order)


def _order_of(model: torch.nn.Module) -> list[int]:
    wrapper = _wrapper_of(model)
    if wrapper is None or dist.get_world_size(wrapper.process_group) < 3:
        return []
    figures = ddp_figures(wrapper)
    placed = figures.get("has_rebuilt_buckets")
    found = figures.get("rebuilt_per_bucket_param_indices" if placed else "prev_iteration_grad_ready_order_indices", "")
    return [int(each) for each in re.findall(r"\d+", str(found))]


def _wrapper_of(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper of a model that changes its order after the first step: with unused parameters, none does."""
    model = getattr(model, "_orig_mod", model)
    changes = isinstance(model, DistributedDataParallel) and not (model.static_graph or model.find_unused_parameters)
    return cast(DistributedDataParallel, model) if changes else None


def _follow(model: torch.nn.Module, wrapper: DistributedDataParallel, order: list[int]) -> None:
    """Give a model gradients of zero in an order before it trains; all ranks come there together."""

    def first(*_: object) -> None:
        if torch.is_grad_enabled():
            handle.remove()
            _give_zeros(wrapper, order)

    handle = model.register_forward_pre_hook(first)


def _give_zeros(wrapper: DistributedDataParallel, order: list[int]) -> None:
    left_out = wrapper.parameters_to_ignore
    named = [(name, each) for name, each in wrapper.module.named_parameters() if each.requires_grad]
    trained = [each for name, each in named if name not in left_out]
    sparse = any(getattr(module, "sparse", False) for module in wrapper.modules())
    # Whoever listens to gradients would take these for a step; another set of parameters has another order.
    if sparse or sorted(order) != list(range(len(trained))) or any(map(has_gradient_hooks, trained)):
        return
    before = [each.grad for each in trained]
    for each in trained:
        each.grad = None
    wrapper.reducer.prepare_for_backward([])
    for number in order:
        torch.autograd.backward(trained[number], torch.zeros_like(trained[number]))
    for each, gradient in zip(trained, before, strict=True):
        each.grad = gradient
