"""Ranks that use different parameters of a block, or different blocks, in one step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from accel_core._torch import shard_groups, to_accumulated
from accel_core.comm.control import Channel
from accel_core.errors import RankDisagreementError
from accel_core.process.world import World

__all__ = ["Participation"]


class _Group:
    """What this rank did in a window with parameters that torch reduces together."""

    def __init__(self, name: str, group: Any, meet: Callable[[str], None]) -> None:
        self.name = name
        self.meet: Callable[[str], None] | None = meet
        self._group = group
        self._forward, self._backward, self._reduce = group.pre_forward, group.pre_backward, group.post_backward
        group.pre_forward, group.pre_backward, group.post_backward = self.forward, self.backward, self.reduce
        self.start_window()

    def start_window(self) -> None:
        """Forget the last window."""
        self.entered = self.reduced = self._is_in_backward = False
        self._unused: dict[int, Any] = {}
        self._used = set[int]()

    def forward(self, *args: object) -> object:
        """Gather the parameters for a forward pass."""
        if torch.is_grad_enabled():
            self.entered = True
            self._come_to("forward pass")
        return self._forward(*args)

    def backward(self, *args: object) -> None:
        """Gather the parameters for a backward pass."""
        if not self._is_in_backward:
            self._come_to("backward pass")
        self.entered = self._is_in_backward = True
        self._backward(*args)

    def reduce(self, *args: object) -> None:
        """Reduce gradients over ranks, unless they are held back."""
        self._is_in_backward = False
        if self.entered and self._group.reduce_grads:
            self._come_to("reduction of gradients")
            self.reduced = True
            self._complete()
        self._reduce(*args)

    def _come_to(self, place: str) -> None:
        """Wait in the first window for all ranks, before torch gathers or reduces what may differ by rank."""
        if self.meet is not None:
            self.meet(f"the {place} of {self.name}")

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
                parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
            if accumulated:
                to_accumulated(each)

    @property
    def is_complete(self) -> bool:
        """Whether this rank used every parameter that trains."""
        return not self.is_skipped and self._unused.keys() <= self._used

    @property
    def is_skipped(self) -> bool:
        """Whether this rank used none of the parameters, some of which train."""
        return not self.entered and any(each.sharded_param.requires_grad for each in self._group.fsdp_params)

    def flags(self, *, complete: bool = False) -> list[int]:
        """Return whether this rank used the group, whether it did not, and whether it used each parameter."""
        skipped = not complete and self.is_skipped
        unused = () if complete else self._unused.keys() - self._used
        own = [int(place not in unused) for place in range(len(self._group.fsdp_params))]
        return [int(not skipped), int(skipped), *own]

    def clear(self, used: Sequence[int]) -> None:
        """Take the gradients of parameters away that no rank used."""
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

    All ranks run the same blocks in the same order. In a model's first window they meet before each of torch's
    collectives, which hang or mix blocks up where they do not match; later on, each looks back where a window ends.
    """

    def __init__(self, world: World, groups: Sequence[dist.ProcessGroup]) -> None:
        self._world = world
        self._groups = tuple(group for group in groups if group.size() > 1)
        # torch's records hold the modules, so a strong reference to them would keep a model alive forever.
        self._models: MutableMapping[torch.nn.Module, _Watched] = WeakIdKeyDictionary()
        self._work: dist.Work | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Follow a model that was sharded in place."""
        if not self._groups:
            return
        groups = [
            self._followed(name or "the rest of the model", record)
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
            for record in shard_groups(module)
        ]
        flags = [flag for group in groups for flag in group.flags(complete=True)]
        complete = torch.tensor(flags, dtype=torch.uint8, device=self._world.device)
        self._models[model] = _Watched(tuple(map(weakref.ref, groups)), complete)

    def _followed(self, name: str, record: Any) -> _Group:
        """Return who follows the parameters of a module already, or from now on."""
        own = getattr(record.post_backward, "__self__", None)
        return own if isinstance(own, _Group) else _Group(name, record, self._meet)

    def _meet(self, place: str) -> None:
        Channel(self._world, place, patient=True).wait()

    def complete(self) -> None:
        """End the window of models whose gradients were reduced; every rank calls it.

        Raises:
            RankDisagreementError: Ranks ran different blocks.
        """
        for watched in list(self._models.values()):
            groups = [group for each in watched.groups if (group := each()) is not None]
            if any(group.reduced for group in groups):
                if any(group.meet is not None for group in groups):
                    self._meet("the end of the backward pass")
                self._agree(groups, watched.complete)
                for group in groups:
                    group.start_window()
                    group.meet = None

    def _agree(self, groups: list[_Group], complete: torch.Tensor) -> None:
        """Learn which parameters no rank used; a rank that used all of them tells the others, and waits for none."""
        if all(group.is_complete for group in groups):
            # A copy: the reduction writes what the other ranks did into it.
            self._share(complete.clone())
            return
        flags = torch.tensor([flag for group in groups for flag in group.flags()], dtype=torch.uint8)
        flags = flags.to(self._world.device)
        self._share(flags)
        self._wait()
        values = iter(flags.tolist())
        highest = [(group, [next(values) for _ in group.flags()]) for group in groups]
        uneven = [group for group, (run, skipped, *_) in highest if run and skipped]
        if uneven:
            own = ", ".join(group.name for group in uneven if not group.is_skipped)
            raise RankDisagreementError(
                "Ranks run the same blocks of a sharded model in a step; got some ranks only that ran "
                f"{', '.join(group.name for group in uneven)}, of which rank {self._world.rank} ran {own or 'none'}. "
                "Run every block on every rank, and multiply by zero what a rank does not need."
            )
        for group, (_, _, *used) in highest:
            group.clear(used)

    def _share(self, flags: torch.Tensor) -> None:
        """Begin to replace numbers by the largest that any rank has."""
        for group in self._groups:
            self._wait()
            self._work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
