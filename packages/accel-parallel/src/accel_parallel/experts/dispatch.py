"""Sending tokens to the ranks that hold their experts, and what these compute back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from accel_core.errors import StateError


class _Context(Protocol):
    """What torch hands from the forward to the backward pass of a function, and what functions here note on it."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]
    sizes: tuple[list[int], list[int], dist.ProcessGroup]
    place: tuple[int, int, int]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What computes on this rank: rows (tokens, width), the number of each one's expert among those here, its weight."""


class Route(NamedTuple):
    """Which tokens go where.

    Attributes:
        order: The choices of this rank's tokens, one after the other, in the order in which they leave.
        held: For each row that comes, the number of its expert among those held here.
        leaving: How many rows go to each rank.
        coming: How many come from each.
    """

    order: torch.Tensor
    held: torch.Tensor
    leaving: list[int]
    coming: list[int]


def routed(numbers: torch.Tensor, experts: int, group: dist.ProcessGroup) -> Route:
    """Return where tokens go by the numbers of their experts; every rank of the group calls it.

    Raises:
        StateError: On some rank a token has the number of an expert that is not there; on every rank.
    """
    ranks, wanted = group.size(), numbers.reshape(-1)
    ordered, order = wanted.sort(stable=True)
    # Where experts begin in that order says how many tokens each has; `bincount` would wait for a device.
    first = torch.arange(experts + 1, dtype=ordered.dtype, device=ordered.device)
    counts = torch.searchsorted(ordered, first).diff()
    # With the counts of its experts, each rank learns how many tokens of the sender have none.
    table = torch.cat([counts.view(ranks, -1), (len(wanted) - counts.sum()).expand(ranks, 1)], 1)
    arriving = torch.empty_like(table)
    dist.all_to_all_single(arriving, table, group=group)
    # Read once: each time, the host waits for the device.
    sums = torch.stack([table[:, :-1].sum(1), arriving[:, :-1].sum(1), arriving[:, -1]])
    leaving, coming, strange = sums.tolist()
    if any(strange):
        _refuse_strange(strange, wanted[(wanted < 0) | (wanted >= experts)], experts, group)
    here = torch.arange(experts // ranks, device=wanted.device).repeat(ranks)
    held = here.repeat_interleave(arriving[:, :-1].flatten(), output_size=sum(coming))
    return Route(order, held, leaving, coming)


def routed_evenly(numbers: torch.Tensor, experts: int, group: dist.ProcessGroup) -> Route:
    """Return where tokens go if all experts get as many, whatever their numbers are, which are not read."""
    ranks, order = group.size(), torch.arange(numbers.numel(), device=numbers.device)
    parts = [len(order) * (rank + 1) // ranks - len(order) * rank // ranks for rank in range(ranks)]
    return Route(order, order % (experts // ranks), parts, parts)


def dispatch(
    tokens: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    *,
    experts: int,
    group: dist.ProcessGroup,
    compute: Compute,
    route: Callable[[torch.Tensor, int, dist.ProcessGroup], Route] = routed,
) -> torch.Tensor:
    """Return the sum of what each token's experts make of it; every rank of the group calls it.

    Each rank holds a run of the experts, all runs of one length. Every token goes to each of its experts, however many
    are sent to one: none is dropped. Gradients take the way back.

    Args:
        tokens: This rank's, (tokens, width).
        numbers: For each token, the numbers of its experts among all, (tokens, choices).
        weights: For each of them, what its expert multiplies by, (tokens, choices).
        experts: How many experts there are on all ranks together.
        group: The ranks that hold them.
        compute: What the experts held here compute of rows.
        route: What says where tokens go.

    Raises:
        StateError: On some rank a token has the number of an expert that is not there; on every rank.
    """
    choices = numbers.shape[-1]
    order, held, leaving, coming = route(numbers, experts, group)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    way = _Way(order, places.view(-1, choices), leaving, coming, group)
    # Weights travel along: experts multiply by them in any case, and once is faster than twice.
    rows, factors = _Out.apply(tokens, weights, way)  # type: ignore[no-untyped-call]
    summed: torch.Tensor = _Back.apply(compute(rows, held, factors), way)  # type: ignore[no-untyped-call]
    return summed.to(tokens.dtype)


def _refuse_strange(found: list[int], own: torch.Tensor, experts: int, group: dist.ProcessGroup) -> NoReturn:
    """Refuse tokens whose expert is not there."""
    senders = [rank for rank, count in zip(dist.get_process_group_ranks(group), found, strict=True) if count]
    here = f"; here {sorted(set(own.tolist()))[:8]}" if own.numel() else ""
    raise StateError(
        f"A router names experts from 0 to {experts - 1}; got {sum(found)} other numbers on the ranks "
        f"{senders}{here}. Give the router as many outputs as there are experts."
    )


class _Way(NamedTuple):
    """The way of tokens to their experts and back: a `Route`, and the places of each token's choices in its order."""

    order: torch.Tensor
    places: torch.Tensor
    leaving: list[int]
    coming: list[int]
    group: dist.ProcessGroup

    def save(self, context: _Context) -> None:
        context.save_for_backward(self.order, self.places)
        context.sizes = self.leaving, self.coming, self.group

    @classmethod
    def saved(cls, context: _Context) -> _Way:
        order, places = context.saved_tensors
        return cls(order, places, *context.sizes)

    def out(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Send each token to its experts, its weights too; return what came, in the order of the senders."""
        rows = [tokens[self.order // self.places.shape[1]]]
        rows += [] if weights is None else [weights.reshape(-1)[self.order]]
        return _sent(rows, self.leaving, self.coming, self.group)

    def back(self, rows: torch.Tensor | None, weights: torch.Tensor | None = None) -> list[torch.Tensor | None]:
        """Send back a row for each that came; return for each token the sum of its rows, and its weights."""
        sent = iter(
            _sent([each for each in (rows, weights) if each is not None], self.coming, self.leaving, self.group)
        )
        summed = None if rows is None else embedding_bag(self.places, next(sent), mode="sum")
        return [summed, None if weights is None else next(sent)[self.places]]


class _Out(torch.autograd.Function):
    """Sends each token with its weights to its experts.

    Both in one, so that gradients travel back in one order on all ranks. These are read by place and summed, which is
    faster than what torch derives: adding them one by one.

    What recomputation computes again are the tensors that are saved, when the first of them is asked for. It exchanges
    tokens too, so all ranks have to ask at one place: here and in `_Back`, and not where experts may have no token.
    """

    @staticmethod
    def forward(
        context: _Context, tokens: torch.Tensor, weights: torch.Tensor, way: _Way
    ) -> tuple[torch.Tensor, torch.Tensor]:
        way.save(context)
        rows, factors = way.out(tokens, weights)
        return rows, factors

    @staticmethod
    @once_differentiable
    def backward(context: _Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = zip(gradients, context.needs_input_grad, strict=False)
        return *_Way.saved(context).back(*(each if needed else None for each, needed in wanted)), None


class _Back(torch.autograd.Function):
    """Sends back what experts made, and sums it for each token."""

    @staticmethod
    def forward(context: _Context, rows: torch.Tensor, way: _Way) -> torch.Tensor | None:
        way.save(context)
        return way.back(rows)[0]

    @staticmethod
    @once_differentiable
    def backward(context: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Way.saved(context).out(gradient)[0], None


def _sent(
    tensors: Sequence[torch.Tensor], leaving: list[int], coming: list[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send the first rows to the first rank of a group and so on, of all tensors at once."""
    arrived = [rows.new_empty((sum(coming), *rows.shape[1:])) for rows in tensors]
    works = [
        dist.all_to_all_single(into, rows.contiguous(), coming, leaving, group=group, async_op=True)
        for into, rows in zip(arrived, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    return arrived


def rows_of_all(rows: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Return the rows of all ranks that read data, one rank after the other; every rank calls it.

    A loss of them all is the loss of the whole batch: each rank computes all of it, and the gradient of its own rows is
    multiplied by the number of ranks, because gradients are averaged.
    """
    for group in groups:
        if group.size() > 1:
            rows = _Rows.apply(rows, group)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(context: _Context, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        lengths = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(group.size())]
        dist.all_gather(lengths, torch.full_like(lengths[0], len(rows)), group=group)
        sizes: list[int] = torch.cat(lengths).tolist()
        context.place = sum(sizes[: group.rank()]), len(rows), group.size()
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])

    @staticmethod
    def backward(context: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        start, length, ranks = context.place
        return gradient[start : start + length] * ranks, None
