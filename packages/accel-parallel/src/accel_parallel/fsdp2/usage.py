"""Which blocks and parameters the ranks used since a step, compared before an optimizer changes anything."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
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
    """A sharded parameter, and whether this rank computed a gradient of it since a step."""

    def __init__(self, name: str, module: nn.Module, own: str) -> None:
        self.name, self._module, self._own = name, module, own
        self._is_followed = self.is_used = False

    def find_shard(self) -> None:
        """Note what optimizers hold, which the module has where nothing is gathered."""
        self.shard = self._module._parameters[self._own]

    def follow(self) -> None:
        """See from now on whether what is gathered gets a gradient."""
        gathered = self._module._parameters[self._own]
        if not (self._is_followed or gathered is None or gathered is self.shard) and gathered.requires_grad:
            self._is_followed = True
            gathered.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, _: torch.Tensor) -> None:
        self.is_used = True

    def state(self) -> int:
        """Return what this rank has of the gradient."""
        if self.shard is None or not self._is_followed:
            return _UNKNOWN
        if self.shard.grad is None:
            return _NONE
        return _USED if self.is_used else _UNUSED


class _Block(dict[tuple[nn.Module, str], _Parameter]):
    """The parameters that torch gathers and reduces together."""

    def find(self, prefix: str, block: Any) -> None:
        """Find them; those of blocks inside are not among them."""
        blocks: list[Any] = [each for each in block.modules() if isinstance(each, FSDPModule) and each is not block]
        inside = {part for each in blocks for part in each.modules()}
        for name, module in block.named_modules():
            for own in module._parameters if module not in inside else ():
                full = ".".join(filter(None, (prefix, name, own)))
                self.setdefault((module, own), _Parameter(full, module, own)).find_shard()


class Usage:
    """Compares once for each step what the ranks used.

    From 2.13 on, torch reduces zeros for a parameter that a rank did not use. One that no rank used loses these zeros
    here, because optimizers change what has a gradient of zero. Ranks that ran different blocks, or under an older
    torch used different parameters, have mixed up what torch gathers or reduces, and are refused.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Only the hook of its module keeps a block alive.
        self._blocks: MutableMapping[nn.Module, ReferenceType[_Block]] = WeakIdKeyDictionary()
        self._order = deque[str](maxlen=_MOST)

    @property
    def _channel(self) -> Channel:
        """What ranks compare over: on the host, where nobody waits for a device."""
        group = "" if gloo_reduces(self._world.device) else "gradients"
        return Channel(self._world, "optimizer.step: gradients", group_name=group)

    def watch(self, model: nn.Module) -> None:
        """Follow the blocks of a model that was sharded in place."""
        for name, module in model.named_modules() if self._world.size > 1 else ():
            if isinstance(module, FSDPModule) and SHARDED not in vars(module):  # torch gathers no head read in slices
                module.reshard()
                self._block(module, name).find(name, module)

    def _block(self, module: Any, name: str) -> _Block:
        known = self._blocks.get(module)
        block = None if known is None else known()
        if block is None:
            block = _Block()
            self._blocks[module] = ref(block)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                module.set_reduce_scatter_unused_params(True, recurse=False)
            module.register_forward_pre_hook(partial(self._enter, name or "the rest of the model", block))
        return block

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, name: str, block: _Block, module: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            self._order.append(name)
            for each in block.values():
                each.follow()

    def compare(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what the ranks used of an optimizer's parameters; every rank calls it.

        Raises:
            RankDisagreementError: Ranks ran different blocks, or have gradients of different parameters.
        """
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        blocks = [block for each in self._blocks.values() if (block := each()) is not None]
        found = [each for block in blocks for each in block.values() if id(each.shard) in own]
        order = [*self._order]
        if not (found or order):
            return
        mine = blake2b("\n".join(order).encode(), digest_size=_DIGEST).digest() + bytes(each.state() for each in found)
        self._order.clear()
        for each in found:
            each.is_used = False
        everywhere = self._channel.exchange_bytes(mine)
        if len({content[:_DIGEST] for content in everywhere}) > 1:
            _refuse_orders(self._channel.exchange(order))
        if len(set(everywhere)) > 1 or _UNUSED in mine[_DIGEST:]:
            _clear(found, [content[_DIGEST:] for content in everywhere])


def _clear(parameters: Sequence[_Parameter], states: Sequence[bytes]) -> None:
    """Clear the gradients of parameters that no rank used; refuse those of which some ranks have none."""
    alone: list[str] = []
    for parameter, *of_ranks in zip(parameters, *states, strict=True):
        ranks = [rank for rank, state in enumerate(of_ranks) if state in (_UNUSED, _USED)]
        if _NONE in of_ranks and ranks:
            alone.append(f"{parameter.name} on the ranks {ranks}")
        elif set(of_ranks) == {_UNUSED} and parameter.shard is not None:
            parameter.shard.grad = None
    if alone:
        raise RankDisagreementError(
            "FSDP2 reduces gradients of parameters that all ranks use, or from torch 2.13 on are in blocks that all "
            f"ranks run; got gradients of {', '.join(alone[:_SHOWN])}{' …' if len(alone) > _SHOWN else ''} alone. "
            "Nothing was updated. Run every block on every rank, and multiply by zero what a rank does not need."
        )


def _refuse_orders(orders: Sequence[Sequence[str]]) -> None:
    """Name the first place at which ranks ran different blocks."""
    longest = max(map(len, orders))
    named = ([(order[place] if place < len(order) else "none") for order in orders] for place in range(longest))
    first = next(names for names in named if len(set(names)) > 1)
    raise RankDisagreementError(
        "All ranks run the same blocks in the same order, or torch mixes up what it gathers; got "
        f"{', '.join(f'{name} on rank {rank}' for rank, name in enumerate(first))}. Nothing was updated. Run every "
        "block on every rank, and multiply by zero what a rank does not need."
    )
