"""The order in which DDP adds up gradients, which a run that goes on takes over from the run before.

Where more than two ranks add up, a gradient's place in a bucket decides whose is added first, and so its last bits. DDP
places gradients as they came in its first step: a run that begins again would have other places in that step. With
`static_graph` it does so later, in a way that cannot be repeated: the last bits of a run that goes on may then differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_core._torch import ddp_figures, has_gradient_hooks
from accel_core.modules.unwrap import ddp_of, trained_by_ddp

_restored: MutableMapping[DistributedDataParallel, list[int]] = WeakKeyDictionary()
"""Orders that wrappers had in a checkpoint, and that `follow` gives them; empty once it did."""


class ReductionOrders:
    """The orders of the models of a run; only those of `DistributedDataParallel` have one."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models

    def state_dict(self) -> dict[str, list[list[int]]]:
        """Return the numbers of each model's parameters in the order of their gradients, where it is known."""
        wrappers = map(_wrapper_of, self._models)
        return {"orders": [[] if wrapper is None else _order_of(wrapper) for wrapper in wrappers]}

    def load_state_dict(self, state: dict[str, list[list[int]]]) -> None:
        """Note the order of each model, which `follow` gives it when all ranks have theirs."""
        for model, order in zip(self._models, state["orders"], strict=False):
            wrapper = _wrapper_of(model)
            if wrapper is not None and wrapper not in _restored and not _order_of(wrapper):
                _restored[wrapper] = order


def follow(models: Sequence[torch.nn.Module], exchange: Callable[[list[bool]], list[list[bool]]]) -> None:
    """Give models that did not train yet the orders that were restored, where all ranks can; every rank calls it."""
    wrappers = [wrapper for wrapper in map(_wrapper_of, models) if wrapper is not None]
    if wrappers:
        able = exchange([_can_follow(wrapper, _restored.get(wrapper, [])) for wrapper in wrappers])
        for wrapper, *answers in zip(wrappers, *able, strict=True):
            if all(answers):
                _give_zeros(wrapper, _restored[wrapper])
                _restored[wrapper] = []  # once: a second load gives nothing


def _order_of(wrapper: DistributedDataParallel) -> list[int]:
    figures = ddp_figures(wrapper)
    placed = figures.get("has_rebuilt_buckets")
    found = figures.get("rebuilt_per_bucket_param_indices" if placed else "prev_iteration_grad_ready_order_indices", "")
    return [int(each) for each in re.findall(r"\d+", str(found))]


def _wrapper_of(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper of a model whose order changes after the first step and shows, on more than two ranks."""
    wrapper = ddp_of(model)
    if wrapper is None or wrapper.static_graph or wrapper.find_unused_parameters:
        return None
    return wrapper if dist.get_world_size(wrapper.process_group) > 2 else None


def _can_follow(wrapper: DistributedDataParallel, order: list[int]) -> bool:
    """Return whether nobody would take the zeros for a step, and the order is of these parameters."""
    trained = [*trained_by_ddp(wrapper.module).values()]
    sparse = any(getattr(module, "sparse", False) for module in wrapper.modules())
    fits = bool(order) and sorted(order) == list(range(len(trained)))
    return fits and not sparse and not any(map(has_gradient_hooks, trained))


def _give_zeros(wrapper: DistributedDataParallel, order: list[int]) -> None:
    trained = [*trained_by_ddp(wrapper.module).values()]
    before = [each.grad for each in trained]
    for each in trained:
        each.grad = None
    wrapper.reducer.prepare_for_backward([])
    for number in order:
        torch.autograd.backward(trained[number], torch.zeros_like(trained[number]))
    for each, gradient in zip(trained, before, strict=True):
        each.grad = gradient
