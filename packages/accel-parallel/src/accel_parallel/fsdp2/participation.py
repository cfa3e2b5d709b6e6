"""Ranks that use different parameters of a block, or different blocks, in one step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from accel_core._torch import shard_groups, to_accumulated
from accel_core.comm import roll_call
from accel_core.comm.control import Channel
from accel_core.process.world import World
from accel_parallel.fsdp2.in_place import overlaps

__all__ = ["Participation", "follower_of"]

_KIND = "order of blocks"
_MOST = 2**16
"""How many places an order holds; ranks meet at those beyond, so none is wrong."""


class _Place:
    """Where a rank is about to begin collectives of torch.

    Attributes:
        name: What errors call it.
        follow: Begins the same collectives with nothing to contribute; held weakly, as it would keep a model alive.
    """

    __slots__ = ("follow", "name")

    def __init__(self, name: str, follow: Callable[[], None]) -> None:
        self.name = name
        self.follow = weakref.WeakMethod(follow)


class _Order:
    """The places that ranks come to in a window, one after another, as they were when all of them met there.

    Where one place alone can follow, a rank that comes to it goes on without a word. A rank that comes to another place
    cannot know whether the others do so too, or have begun a collective that ends only with its help: it calls them.
    Those that went on are followed, one place at a time, until they notice that they were missed and come here as well.
    """

    def __init__(self, world: World, groups: Sequence[dist.ProcessGroup]) -> None:
        self._world = world
        roll = roll_call.start(world, groups)
        assert roll is not None, "several ranks have a process group"
        self._roll = roll
        self.forget()

    def forget(self) -> None:
        """Learn anew, as where a model is new."""
        self._first: dict[_Place, Any] = {}
        self._next, self._known = self._first, 0

    def come_to(self, place: _Place) -> None:
        """Go on to a place if all ranks do.

        Raises:
            RankDisagreementError: Other ranks came to another place.
            RemoteRankError: Another rank failed, or is gone.
        """
        after = self._next.get(place)
        if after is None or len(self._next) > 1 or _KIND in self._roll.missed:
            after = self._meet(place)
        self._next = after

    def end(self) -> None:
        """Begin a new window."""
        self._next = self._first

    def _meet(self, place: _Place) -> dict[_Place, Any]:
        """Return what follows a place, after all ranks were met there."""
        name, instead = place.name, place.name
        calls = _KIND in self._roll.missed
        if len(self._next) == 1 and place not in self._next:
            calls, instead = True, f"{place.name} instead of {next(iter(self._next)).name}"
        while calls and self._roll.is_passed(name, _KIND) and len(self._next) == 1:
            name = instead
            (expected,) = self._next
            follow = expected.follow()
            if follow is not None:
                follow()
            self._next = self._next[expected]
        self._roll.missed.discard(_KIND)
        here, self._next = self._next, self._first  # where ranks disagree, the next pass begins a window
        Channel(self._world, name, patient=True).wait()
        if place not in here and self._known < _MOST:
            here[place] = {}
            self._known += 1
        after: dict[_Place, Any] = here.get(place, {})
        return after


class _Group:
    """What this rank did in a window with parameters that torch reduces together."""

    watched: _Watched

    def __init__(self, name: str, group: Any, order: _Order) -> None:
        self.order = order
        self._group, self._name = group, name
        self._forward, self._backward, self._reduce = group.pre_forward, group.pre_backward, group.post_backward
        group.pre_forward, group.pre_backward, group.post_backward = self.forward, self.backward, self.reduce
        self._at_forward = _Place(f"the forward pass of {name}", self._follow_forward)
        self._at_backward = _Place(f"the backward pass of {name}", self._follow_backward)
        self._at_addition = _Place(f"the backward pass of {name} in a window", self._follow_addition)
        self._at_reduction = _Place(f"the reduction of gradients of {name}", self._follow_reduction)
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
            self.order.come_to(self._at_forward)
        return self._forward(*args)

    def backward(self, *args: object) -> None:
        """Gather the parameters for a backward pass."""
        if not self._is_in_backward:
            self.order.come_to(self._at_backward if self._group.reduce_grads else self._at_addition)
        self.entered = self._is_in_backward = True
        self._backward(*args)

    def reduce(self, *args: object) -> None:
        """Reduce gradients over ranks, unless they are held back."""
        self._is_in_backward = False
        if self.entered and self._group.reduce_grads:
            self.order.come_to(self._at_reduction)
            self.reduced = True
            self._complete()
        self._reduce(*args)

    def also_at(self, what: str, follow: Callable[[], None], *, reduces: bool) -> Callable[[], None]:
        """Return what comes to another place, where not torch gathers and reduces these parameters."""
        place = _Place(f"{what} of {self._name}", follow)

        def come() -> None:
            self.order.come_to(place)
            self.reduced |= reduces and self._group.reduce_grads

        return come

    def _follow_forward(self) -> None:
        self._forward(None, (), {})
        self._group.post_forward(None, (), None)

    def _follow_backward(self) -> None:
        self.watched.end_forward()
        self._backward(True)

    def _follow_addition(self) -> None:
        self._follow_backward()
        self._reduce()

    def end_forward(self) -> None:
        """Leave a forward pass that still runs on this rank as if it were over."""
        if self._group._training_state.name == "FORWARD":
            self._group.post_forward(None, (), None)

    def _follow_reduction(self) -> None:
        self._complete()
        self._reduce()

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
        """Whether this rank used every parameter of those that train, or none."""
        return self._unused.keys() <= self._used

    def flags(self, *, complete: bool = False) -> list[int]:
        """Return for each parameter whether this rank used it."""
        unused = () if complete else self._unused.keys() - self._used
        return [int(place not in unused) for place in range(len(self._group.fsdp_params))]

    def clear(self, used: Sequence[int]) -> None:
        """Take the gradients of parameters away that no rank used."""
        for place, parameter in self._unused.items():
            if not used[place]:
                parameter.grad = None


def follower_of(record: Any) -> _Group | None:
    """Return who follows the parameters of a record of torch, if someone does."""
    own = getattr(record.post_backward, "__self__", None)
    return own if isinstance(own, _Group) else None


class _Watched:
    """The groups of a model, what a rank says that used all of its parameters, and where a window of it ends."""

    def __init__(
        self, name: str, groups: Sequence[_Group], device: torch.device, share: Callable[[torch.Tensor], None]
    ) -> None:
        self._groups = tuple(map(weakref.ref, groups))
        flags = [flag for group in groups for flag in group.flags(complete=True)]
        self._complete = torch.tensor(flags, dtype=torch.uint8, device=device)
        self._share = share
        self.end = _Place(f"the end of the backward pass{name}", self.share_complete)

    @property
    def groups(self) -> list[_Group]:
        """The groups that still live."""
        return [group for each in self._groups if (group := each()) is not None]

    def end_forward(self) -> None:
        """Leave forward passes that still run on this rank, those of inner blocks first."""
        for group in reversed(self.groups):
            group.end_forward()

    def share_complete(self) -> None:
        """Tell the others that this rank used all parameters, and wait for none."""
        # A copy: the reduction writes what the other ranks did into it.
        self._share(self._complete.clone())


class Participation:
    """Lets ranks use different parameters of a block, such as experts, as one process does.

    torch reduces those gradients of a block that a rank has, one behind the other: ranks that used different parameters
    would add up gradients of different ones. So a parameter that this rank did not use gets a gradient of zero before
    its block is reduced. One that no rank used loses it afterwards: optimizers change what has a gradient of zero.

    All ranks run the same blocks in the same order. Where this is not known yet they meet before each of torch's
    collectives, which hang or mix blocks up where they do not match.
    """

    def __init__(self, world: World, groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh) -> None:
        self._world = world
        self._groups = tuple(group for group in groups if group.size() > 1)
        self._order = _Order(world, mesh.get_all_groups()) if self._groups else None
        # torch's records hold the modules, so a strong reference to them would keep a model alive forever.
        self._models: MutableMapping[torch.nn.Module, _Watched] = WeakIdKeyDictionary()
        self._numbers = itertools.count()
        self._work: dist.Work | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Follow a model that was sharded in place."""
        if self._order is None:
            return
        number = next(self._numbers)
        of = f" of model {number}" if number else ""
        groups = [
            self._followed(f"{name or 'the rest of the model'}{of}", record, self._order)
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
            for record in shard_groups(module)
        ]
        self._order.forget()
        self._models[model] = watched = _Watched(of, groups, self._world.device, self._share)
        for group in groups:
            group.watched = watched

    @staticmethod
    def _followed(name: str, record: Any, order: _Order) -> _Group:
        """Return who follows the parameters of a module already, or from now on."""
        own = follower_of(record)
        if own is None:
            return _Group(name, record, order)
        own.order = order
        return own

    def complete(self) -> None:
        """End the window of models whose gradients were reduced; every rank calls it.

        Raises:
            RankDisagreementError: Ranks ran different blocks.
        """
        orders = set()
        for watched in list(self._models.values()):
            groups = watched.groups
            if any(group.reduced for group in groups):
                groups[0].order.come_to(watched.end)
                self._agree(groups, watched)
                orders.add(groups[0].order)
                for group in groups:
                    group.start_window()
        for order in orders:
            order.end()

    def _agree(self, groups: list[_Group], watched: _Watched) -> None:
        """Learn which parameters no rank used; a rank that used all of them tells the others, and waits for none."""
        if all(group.is_complete for group in groups):
            watched.share_complete()
            return
        flags = torch.tensor([flag for group in groups for flag in group.flags()], dtype=torch.uint8)
        flags = flags.to(self._world.device)
        self._share(flags)
        self._wait()
        values = iter(flags.tolist())
        for group in groups:
            group.clear([next(values) for _ in group.flags()])

    def _share(self, flags: torch.Tensor) -> None:
        """Begin to replace numbers by the largest that any rank has."""
        for group in self._groups:
            self._wait()
            self._work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)
            if not overlaps(self._world.device):
                self._wait()

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
