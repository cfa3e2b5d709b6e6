"""Ranks that use different parameters of a block in one step."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from accel_core._torch import shard_groups

__all__ = ["Participation"]


class _Group:
    """What this rank did in a window with parameters that torch reduces together.

    Args:
        group: torch's record of them. Its methods are replaced on this object, which so lives as long as it does.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._forward, self._backward, self._reduce = group.pre_forward, group.pre_backward, group.post_backward
        group.pre_forward, group.pre_backward, group.post_backward = self.forward, self.backward, self.reduce
        self.start_window()

    def start_window(self) -> None:
        """Forget the last window."""
        self.entered = self.reduced = False
        self._unused: dict[int, Any] = {}
        self._used = set[int]()

    def forward(self, *args: Any) -> Any:
        """Gather the parameters for a forward pass."""
        self.entered |= torch.is_grad_enabled()
        return self._forward(*args)

    def backward(self, *args: Any) -> None:
        """Gather the parameters for a backward pass."""
        self.entered = True
        self._backward(*args)

    def reduce(self, *args: Any) -> None:
        """Reduce gradients over ranks, unless they are held back."""
        if self.entered and self._group.reduce_grads:
            self.reduced = True
            self._complete()
        self._reduce(*args)

    @torch.no_grad()
    def _complete(self) -> None:
        """Give parameters that this rank did not use gradients of zero, in the format of the others."""
        accumulated = any(each.unsharded_accumulated_grad is not None for each in self._group.fsdp_params)
        for place, each in enumerate(self._group.fsdp_params):
            if each.unsharded_accumulated_grad is not None:
                self._used.add(place)
                continue
            parameter = each.unsharded_param
            if parameter.grad is not None:
                self._used.add(place)
            elif parameter.requires_grad:
                if each.sharded_param.grad is None:
                    self._unused[place] = each.sharded_param
                parameter.grad = torch.zeros_like(parameter)
            if accumulated:
                each.to_accumulated_grad_if_needed()

    @property
    def is_complete(self) -> bool:
        """Whether this rank used every parameter that trains."""
        if self.entered:
            return self._unused.keys() <= self._used
        return not any(each.sharded_param.requires_grad for each in self._group.fsdp_params)

    def flags(self, *, complete: bool = False) -> list[int]:
        """Return a number for each parameter, 0 if this rank did not use it.

        Args:
            complete: Return what a rank brings that used all of them.
        """
        unused = () if complete else self._unused.keys() - self._used
        return [int(place not in unused) for place in range(len(self._group.fsdp_params))]

    def clear(self, used: Sequence[int]) -> None:
        """Take the gradients of parameters away that no rank used.

        Args:
            used: A number for each parameter, 0 if no rank used it.
        """
        for place, parameter in self._unused.items():
            if not used[place]:
                parameter.grad = None


class _Watched(NamedTuple):
    """The groups of a model, and what a rank says that used all of its parameters."""

    groups: tuple[weakref.ref[_Group], ...]
    complete: torch.Tensor


class Participation:
    """Lets ranks use different parameters of a block, such as experts, as one process does.

    torch reduces those gradients of a block that a rank has, one behind the other: ranks that used different parameters
    would add up gradients of different ones. So a parameter that this rank did not use gets a gradient of zero before
    its block is reduced. One that no rank used loses it afterwards: optimizers change what has a gradient of zero.

    Args:
        device: Device of the ranks.
        groups: The process groups over which gradients are reduced, one after the other.
    """

    def __init__(self, device: torch.device, groups: Sequence[dist.ProcessGroup]) -> None:
        self._device = device
        self._groups = tuple(group for group in groups if group.size() > 1)
        # torch's records hold the modules, so a strong reference to them would keep a model alive for ever.
        self._models: MutableMapping[torch.nn.Module, _Watched] = WeakIdKeyDictionary()
        self._work: dist.Work | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Follow a model that was sharded in place.

        Args:
            model: The model. One that is followed already is looked through again.
        """
        if not self._groups:
            return
        records = [
            group for module in model.modules() if isinstance(module, FSDPModule) for group in shard_groups(module)
        ]
        owners = [getattr(record.post_backward, "__self__", None) for record in records]
        groups = [
            own if isinstance(own, _Group) else _Group(record) for own, record in zip(owners, records, strict=True)
        ]
        flags = [flag for group in groups for flag in group.flags(complete=True)]
        complete = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        self._models[model] = _Watched(tuple(map(weakref.ref, groups)), complete)

    def complete(self) -> None:
        """End the window of models whose gradients were reduced; every rank calls it."""
        for watched in list(self._models.values()):
            groups = [group for each in watched.groups if (group := each()) is not None]
            if any(group.reduced for group in groups):
                self._agree(groups, watched.complete)
                for group in groups:
                    group.start_window()

    def _agree(self, groups: list[_Group], complete: torch.Tensor) -> None:
        """Learn which parameters no rank used; a rank that used all of them tells the others, and waits for none."""
        if all(group.is_complete for group in groups):
            self._tell(complete)
            return
        flags = torch.tensor([flag for group in groups for flag in group.flags()], dtype=torch.uint8)
        flags = flags.to(self._device)
        self._tell(flags)
        self._wait()
        used = iter(flags.tolist())
        for group in groups:
            group.clear([next(used) for _ in group.flags()])

    def _tell(self, flags: torch.Tensor) -> None:
        """Begin to replace numbers by the largest that any rank has."""
        for group in self._groups:
            self._wait()
            self._work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
