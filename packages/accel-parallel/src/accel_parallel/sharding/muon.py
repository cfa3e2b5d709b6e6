"""Muon on matrices that are spread over ranks: each is put together and orthogonalized on one of them alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accel_core.comm.control import Channel
from accel_core.mesh.layout import Layout
from accel_core.mesh.tensor import Box, local_memory, local_parts
from accel_core.process.world import World

_SAME = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_Pair = tuple[DTensor, dict[str, Any]]
"""A matrix, and the group of the optimizer that it is in."""


def orthogonalize_on_owners(optimizer: torch.optim.Optimizer, world: World, layout: Layout) -> None:
    """Let each matrix of a Muon that ranks hold in parts be orthogonalized once, on its owner, and not on every rank.

    Torch would put matrices together on all ranks for every product. Whole ones stay with it, and all where ranks have
    other stages of a model, or other experts.
    """
    alike = layout.size("pp", "ep") == 1  # every rank holds a part of every matrix
    if type(optimizer) is getattr(torch.optim, "Muon", None) and world.size > 1 and alike:
        owners = _Owners(optimizer, world)
        optimizer.register_step_pre_hook(owners.before)
        optimizer.register_step_post_hook(owners.after)


class _Owners:
    """Updates the spread matrices of one Muon before torch's own step, which then sees no gradients of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._gradients: dict[DTensor, torch.Tensor | None] = {}
        self._boxes: dict[DTensor, tuple[Box, ...]] = {}  # which part of a matrix each rank holds

    def before(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Update what is spread; of a closure, which computes the gradients, torch's step gets the result."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0], lambda: loss), {}
        groups = self._optimizer.param_groups
        spread = [(each, group) for group in groups for each in group["params"] if self._is_spread(each)]
        self._locate([each for each, _ in spread])
        # The largest first: a round, of one matrix for each rank, waits for its longest.
        spread.sort(key=lambda pair: (str(pair[0].dtype), -pair[0].numel()))
        for _, alike in itertools.groupby(spread, key=lambda pair: pair[0].dtype):
            matrices = list(alike)
            for start in range(0, len(matrices), self._world.size):
                self._update(matrices[start : start + self._world.size])
        self._gradients = {each: each.grad for each, _ in spread}
        for each in self._gradients:
            each.grad = None
        return args, kwargs

    def after(self, *_: object) -> None:
        """Give the gradients back."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients = {}

    def _is_spread(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            return False
        cut = any(each.is_shard() for each in parameter.placements)
        return cut and gradient.placements == parameter.placements

    def _locate(self, parameters: Sequence[DTensor]) -> None:
        """Learn which part of each matrix every rank holds, where one is new."""
        new = [each for each in parameters if each not in self._boxes]
        if new:
            own = [next(local_parts(each))[0] for each in new]
            everywhere = Channel(self._world, "optimizer.step: Muon").exchange(own)
            self._boxes.update(zip(new, zip(*everywhere, strict=True), strict=True))

    @torch.no_grad()
    def _update(self, matrices: Sequence[_Pair]) -> None:
        """Update at most one matrix for each rank: it is gathered on its owner, which scatters the update."""
        rank, size = self._world.rank, self._world.size
        device = local_memory(matrices[0][0]).device
        nothing = torch.empty(0, dtype=matrices[0][0].dtype, device=device)
        sent, come, back = [nothing] * size, [0] * size, [0] * size
        for owner, (matrix, group) in enumerate(matrices):
            boxes, part = self._boxes[matrix], self._direction(matrix, group)
            sources = _sources(boxes, owner)
            back[owner] = part.numel()
            if rank in sources:
                sent[owner] = part.flatten()
            if rank == owner:
                come = [math.prod(boxes[each][1]) if each in sources else 0 for each in range(size)]
        parts = _trade(sent, come)
        if rank < len(matrices):
            matrix, group = matrices[rank]
            boxes = self._boxes[matrix]
            whole = torch.empty(matrix.shape, dtype=matrix.dtype, device=device)
            for box, part in zip(boxes, parts, strict=True):
                if part.numel():
                    whole[_slices(box)] = part.view(box[1])
            step = _orthogonal_step(whole, group)
            updates = [step[_slices(box)].flatten() for box in boxes]
        else:
            updates = [nothing] * size
        for (matrix, group), update in zip(matrices, _trade(updates, back), strict=False):
            local = local_memory(matrix)
            local.mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(update.view(local.shape))

    def _direction(self, matrix: DTensor, group: dict[str, Any]) -> torch.Tensor:
        """Update this rank's part of the momentum, and return what is orthogonalized."""
        gradient, state = matrix.grad, self._optimizer.state[matrix]
        assert gradient is not None
        if "momentum_buffer" not in state:  # under torch's name, and as torch makes it
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        held, momentum = local_memory(gradient), local_memory(state["momentum_buffer"])
        momentum.lerp_(held, 1 - group["momentum"])
        return held.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _orthogonal_step(whole: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return what torch's Muon adds to a matrix, by a Muon without momentum that steps from zero."""
    found = torch.nn.Parameter(torch.zeros_like(whole))
    found.grad = whole
    settings = {name: group[name] for name in _SAME}
    torch.optim.Muon([found], **settings, weight_decay=0.0, momentum=0.0, nesterov=False).step()  # type: ignore[no-untyped-call]
    return found.data


def _sources(boxes: Sequence[Box], owner: int) -> set[int]:
    """Return which ranks send their part to an owner: of those that hold the same one, the next one from it on."""
    nearest: dict[Box, int] = {}
    for rank in sorted(range(len(boxes)), key=lambda rank: (rank - owner) % len(boxes)):
        nearest.setdefault(boxes[rank], rank)
    return set(nearest.values())


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


def _trade(sent: Sequence[torch.Tensor], come: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Send each rank one run of numbers, and return what came from each; every rank calls it."""
    received = sent[0].new_empty(sum(come))
    dist.all_to_all_single(received, torch.cat(list(sent)), list(come), [each.numel() for each in sent])
    return torch.split(received, list(come))
