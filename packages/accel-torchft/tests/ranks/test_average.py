"""Gradients that are averaged in buckets, against one process that has them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_core.accelerator import Accelerator
from accel_testing import world
from accel_torchft.average import Average

SHARES = (0.75, 0.25)


class Net(nn.Module):
    """Layers of which the last one fills the first bucket, one that rank 1 leaves out, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left_out, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 600).requires_grad_(False)
        self.last = nn.Linear(600, 600)

    def forward(self, inputs: torch.Tensor, rank: int, in_parts: bool = False) -> torch.Tensor:
        """Return the loss; `in_parts` uses the last layer in two checkpoints that run backward one by one."""
        hidden = self.first(inputs)
        hidden = hidden if rank == 1 else hidden + self.left_out(hidden)
        hidden = self.frozen(hidden)
        if not in_parts:
            return self.last(self.last(hidden)).pow(2).mean()
        middle = checkpoint(self.last, hidden, use_reentrant=True)
        return checkpoint(self.last, middle, use_reentrant=True).pow(2).mean()


def send(tensor: torch.Tensor) -> Any:
    """Add a tensor up over ranks."""
    return dist.all_reduce(tensor, async_op=True)


def arrived(work: Any) -> bool:
    """Wait."""
    work.wait()
    return True


def inputs_of(rank: int) -> torch.Tensor:
    """Return what a rank reads."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def alone(factor: float = 1.0) -> dict[str, torch.Tensor | None]:
    """Return the gradients of all ranks together."""
    net = Net()
    for rank, share in enumerate(SHARES):
        (net(inputs_of(rank), rank) * share * factor).backward()
    return {name: each.grad for name, each in net.named_parameters()}


def check(net: Net, wanted: dict[str, torch.Tensor | None]) -> None:
    """Compare gradients; those that nobody has are left out on all ranks."""
    for name, each in net.named_parameters():
        assert (each.grad is None) == (wanted[name] is None), name
        if each.grad is not None:
            torch.testing.assert_close(each.grad, wanted[name], rtol=0, atol=1e-6)


def begun(shares: tuple[float | None, ...]) -> tuple[int, Average, Net]:
    """Return this rank, what averages with what it counts, and a model."""
    rank = Accelerator(cpu=True).process_index
    return rank, Average(send, arrived, lambda: shares[rank]), Net()


@world(2)
@pytest.mark.parametrize("early", [False, True])
def test_gradients_are_those_of_one_process(early: bool) -> None:
    """Weighted, added up over two passes and twice in a row, where a rank leaves a layer out that another has."""
    rank, average, net = begun(SHARES)
    for _ in range(2):
        net(inputs_of(rank), rank).backward()
        average.lay_out([*net.parameters()], early)
        net(inputs_of(rank), rank).backward()
        assert bool(average._sent) == early  # the last layer's are on their way
        average.finish()
        check(net, alone(2.0))
        net.zero_grad()


@world(2)
def test_a_gradient_that_comes_in_parts_is_sent_later() -> None:
    """Reentrant checkpoints run backward one by one: a step whose gradient was sent too soon is not to be made."""
    rank, average, net = begun(SHARES)
    for was_early in (True, False):
        average.lay_out([*net.parameters()], early=True)
        net(inputs_of(rank).requires_grad_(), rank, in_parts=True).backward()
        average.finish()
        assert average.was_early == was_early
        if not was_early:
            check(net, alone())
        net.zero_grad()


@world(2)
def test_a_step_that_is_lost_leaves_gradients_alone() -> None:
    """Where it is not known what this replica counts, nothing is sent."""
    rank, average, net = begun((None, None))
    average.lay_out([*net.parameters()], early=True)
    net(inputs_of(rank), rank).backward()
    own = {name: None if each.grad is None else each.grad.clone() for name, each in net.named_parameters()}
    average.finish()
    check(net, own)
