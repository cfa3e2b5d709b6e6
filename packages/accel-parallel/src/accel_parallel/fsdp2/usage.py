"""Which blocks and parameters the ranks used since a step, compared before an optimizer changes anything."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.comm.control import Channel
from accel_core.errors import RankDisagreementError
from accel_core.modules.linear_loss import SHARDED
from accel_core.process.world import World
from accel_parallel.fsdp2.in_place import gloo_reduces

_NONE, _UNUSED, _USED, _UNKNOWN = range(4)
"""What a rank has of a gradient: nothing, torch's zeros as it did not use the parameter, or what it computed; nothing
is known of what it never gathered."""
_DIGEST, _MOST, _SHOWN = 8, 2**12, 8


class _Parameter:
    """Whether this rank computed a gradient of a sharded parameter since a step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_followed = self.is_used = False

    def note(self, _: Tensor) -> None:
        """Note that what was gathered got a gradient."""
        self.is_used = True

    def state(self, shard: Tensor) -> int:
        """Return what this rank has of the gradient."""
        if not self.is_followed:
            return _UNKNOWN
        if shard.grad is None:
            return _NONE
        return _USED if self.is_used else _UNUSED


class Usage:
    """Compares once for each step what the ranks used.

    From 2.13 on, torch reduces zeros for a parameter that a rank did not use. One that no rank used loses these zeros
    here, because optimizers change what has a gradient of zero. Ranks that ran different blocks, or under an older
    torch used different parameters, have mixed up what torch gathers or reduces, and are refused.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._parameters: MutableMapping[Tensor, _Parameter] = WeakIdKeyDictionary()  # by what optimizers hold
        self._hooks: MutableMapping[nn.Module, RemovableHandle] = WeakIdKeyDictionary()
        self._order = deque[str](maxlen=_MOST)

    def watch(self, model: nn.Module) -> None:
        """Follow the blocks of a model that was sharded in place."""
        for name, module in model.named_modules() if self._world.size > 1 else ():
            if isinstance(module, FSDPModule) and SHARDED not in vars(module):  # torch gathers no head read in slices
                module.reshard()
                self._follow(name, module)

    def _follow(self, prefix: str, block: Any) -> None:
        """Note when a block runs, with the parameters that torch gathers then; those of blocks inside are not."""
        if block in self._hooks:
            self._hooks[block].remove()
        elif hasattr(block, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
            block.set_reduce_scatter_unused_params(True, recurse=False)
        blocks: list[Any] = [each for each in block.modules() if isinstance(each, FSDPModule) and each is not block]
        inside = {part for each in blocks for part in each.modules()}
        found: list[tuple[nn.Module, str, _Parameter]] = []
        for name, module in block.named_modules():
            for own, shard in module._parameters.items() if module not in inside else ():
                if shard is not None:
                    full = ".".join(filter(None, (prefix, name, own)))
                    found.append((module, own, self._parameters.setdefault(shard, _Parameter(full))))
        enter = partial(self._enter, prefix or "the rest of the model", found)
        self._hooks[block] = block.register_forward_pre_hook(enter)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(
        self, name: str, parameters: list[tuple[nn.Module, str, _Parameter]], block: nn.Module, args: object
    ) -> None:
        if torch.is_grad_enabled():
            self._order.append(name)
            for module, own, each in parameters:
                gathered: Any = module._parameters[own]
                if not each.is_followed and gathered.requires_grad and gathered not in self._parameters:
                    each.is_followed = True
                    gathered.register_post_accumulate_grad_hook(each.note)

    def compare(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what the ranks used of an optimizer's parameters; every rank calls it.

        Raises:
            RankDisagreementError: Ranks ran different blocks, or have gradients of different parameters.
        """
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        found = [(each, self._parameters[each]) for each in held if each in self._parameters]
        order = [*self._order]
        if not (found or order):
            return
        states = bytes(each.state(shard) for shard, each in found)
        mine = blake2b("\n".join(order).encode(), digest_size=_DIGEST).digest() + states
        self._order.clear()
        for _, each in found:
            each.is_used = False
        # On the host, where nobody waits for a device.
        group = "" if gloo_reduces(self._world.device) else "gradients"
        channel = Channel(self._world, "optimizer.step: gradients", group_name=group)
        everywhere = channel.exchange_bytes(mine)
        if len({content[:_DIGEST] for content in everywhere}) > 1:
            _refuse_orders(channel.exchange(order))
        if len(set(everywhere)) > 1 or _UNUSED in states:
            _clear(found, [content[_DIGEST:] for content in everywhere])


def _clear(parameters: Sequence[tuple[Tensor, _Parameter]], states: Sequence[bytes]) -> None:
    """Clear the gradients of parameters that no rank used; refuse those of which some ranks have none."""
    alone: list[str] = []
    for (shard, parameter), *of_ranks in zip(parameters, *states, strict=True):
        ranks = [rank for rank, state in enumerate(of_ranks) if state in (_UNUSED, _USED)]
        if _NONE in of_ranks and ranks:
            alone.append(f"{parameter.name} on the ranks {ranks}")
        elif set(of_ranks) == {_UNUSED}:
            shard.grad = None
    if alone:
        raise RankDisagreementError(
            "FSDP2 reduces gradients of parameters that all ranks use, or from torch 2.13 on are in blocks that all "
            f"ranks run; got gradients of {', '.join(alone[:_SHOWN])}{' …' if len(alone) > _SHOWN else ''} alone. "
            "Nothing was updated. Run every block on every rank, and multiply by zero what a rank does not need."
        )


def _refuse_orders(orders: Sequence[Sequence[str]]) -> None:
    """Name the first place at which ranks ran different blocks."""
    first = next(names for names in zip_longest(*orders, fillvalue="none") if len(set(names)) > 1)
    raise RankDisagreementError(
        "All ranks run the same blocks in the same order, or torch mixes up what it gathers; got "
        f"{', '.join(f'{name} on rank {rank}' for rank, name in enumerate(first))}. Nothing was updated. Run every "
        "block on every rank, and multiply by zero what a rank does not need."
    )
