"""FSDP2 where ranks use different parameters of a block, against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from several_ranks import COPIES, advance, assert_trained, blocks, fsdp
from torch import nn
from torch.distributed.fsdp import fully_shard

from accel_core.accelerator import Accelerator
from accel_core.errors import RankDisagreementError
from accel_core.host.versions import is_torch_version
from accel_core.plugins.parallelism import ParallelismConfig
from accel_testing import requires, world

pytestmark = requires("torch:2.8")  # the first that computes in shards on a CPU

_fills_in = requires("torch:2.13")  # the first that reduces zeros for parameters that a rank did not use

Orders = tuple[tuple[int, ...], tuple[int, ...]]

_STEPS = 5
_NEVER = 3  # an expert that no batch chooses


class Block(nn.Module):
    """A layer that every batch uses, and experts of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(_NEVER + 1))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        """Add what one expert makes of numbers."""
        y: torch.Tensor = x + self.experts[chosen](self.shared(x).tanh())
        return y


class Net(nn.Module):
    """Blocks that are run in turn, each as often as asked, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, chosen: int, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        """Return two numbers for four; each block takes the next expert."""
        for place, index in enumerate(order):
            x = self.blocks[index](x, (chosen + place) % _NEVER)
        y: torch.Tensor = self.head(x)
        return y


_plugin = partial(fsdp, state_dict_type="FULL_STATE_DICT", **blocks("Block"))


def _batches(step: int, window: int, ranks: int) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Yield the batches of a window, for each rank what it computes with and the expert that it chooses."""
    for batch in range(window):
        yield [
            (torch.full((2, 4), 0.1 + step + batch - rank).sin(), (step + batch + rank) % _NEVER)
            for rank in range(ranks)
        ]


def _loss(net: nn.Module, x: torch.Tensor, chosen: int, order: tuple[int, ...]) -> torch.Tensor:
    return net(x, chosen, order).square().mean()


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # Both change a parameter whose gradient is zero, and not one that has none.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def _alone(ranks: int, kind: str, window: int, order: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the norms and the weights of one process that computes what all ranks do."""
    net = Net()
    optimizer = _OPTIMIZERS[kind](net.parameters())
    norms = []
    for step in range(_STEPS):
        optimizer.zero_grad()
        for batch in _batches(step, window, ranks):
            for x, chosen in batch:
                (_loss(net, x, chosen, order) / ranks / window).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.2).item())
        optimizer.step()
    return norms, net.state_dict()


def _sharded(
    kind: str,
    window: int,
    order: tuple[int, ...],
    axes: ParallelismConfig | None = None,
    **given: Any,
) -> None:
    """Train on all ranks and compare with one process."""
    accelerator = Accelerator(gradient_accumulation_steps=window, fsdp_plugin=_plugin(**given), parallelism_config=axes)
    net = Net()
    net, optimizer = accelerator.prepare(net, _OPTIMIZERS[kind](net.parameters()))
    norms = []
    for step in range(_STEPS):
        for batch in _batches(step, window, accelerator.num_processes):
            with accelerator.accumulate(net):
                loss = _loss(net, *batch[accelerator.process_index], order)
                norms.append(advance(loss, optimizer, run=accelerator, model=net, clip=0.2))
    expected, weights = _alone(accelerator.num_processes, kind, window, order)
    torch.testing.assert_close(norms[window - 1 :: window], expected, rtol=0, atol=1e-6)
    assert_trained(accelerator, net, weights)


@pytest.mark.parametrize("kind", _OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 3])
@_fills_in
@world(2)
def test_experts_that_differ_by_rank_train_as_in_one_process(kind: str, window: int) -> None:
    """Ranks choose different experts of a block, and an expert that nobody chose keeps its weights."""
    _sharded(kind, window, (0, 1, 2))


@pytest.mark.parametrize("reshard", [True, False])
@_fills_in
@world(2)
def test_blocks_run_twice_or_never_train_as_one_process(reshard: bool) -> None:
    """A block that runs twice reduces twice, and one that no rank runs stays as it is."""
    _sharded("adamw", 2, (0, 2, 0), reshard_after_forward=reshard)


@pytest.mark.parametrize("copies", [False, True])
@_fills_in
@world(4)
def test_four_ranks_with_other_experts_train_as_one_process(copies: bool) -> None:
    """Four shards, or two copies of two shards, train as one process."""
    axes = ParallelismConfig(**COPIES) if copies else None
    _sharded("adamw", 2, (0, 1, 2), axes)


@_fills_in
@world(2)
def test_presharded_experts_train_in_a_plain_loop() -> None:
    """Neither prepare() sharding the model nor the Accelerator's backward is needed."""
    accelerator = Accelerator(fsdp_plugin=_plugin())
    net, alone = Net(), Net()
    for block in net.blocks:
        fully_shard(block).set_force_sum_reduction_for_comms(True)
    fully_shard(net).set_force_sum_reduction_for_comms(True)
    prepared, optimizer = accelerator.prepare(net, _OPTIMIZERS["adamw"](net.parameters()))
    expected = _OPTIMIZERS["adamw"](alone.parameters())
    for step in range(_STEPS):
        (batch,) = _batches(step, 1, accelerator.num_processes)
        _loss(prepared, *batch[accelerator.process_index], (0, 1, 2)).backward()
        (sum(_loss(alone, *each, (0, 1, 2)) for each in batch) / accelerator.num_processes).backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    assert_trained(accelerator, prepared, alone.state_dict())


def _step_refused(orders: Orders, chosen: tuple[int, int] = (0, 0)) -> str:
    """Return the error of a step in which ranks differ; weights stay, and a next step is taken."""
    accelerator = Accelerator(fsdp_plugin=_plugin())
    rank = accelerator.process_index
    net: Any = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = [each.to_local().clone() for each in net.parameters()]
    accelerator.backward(_loss(net, torch.ones(2, 4), chosen[rank], orders[rank]))
    with pytest.raises(RankDisagreementError) as found:
        optimizer.step()
    assert all(torch.equal(one, each.to_local()) for one, each in zip(before, net.parameters(), strict=True))
    optimizer.zero_grad()
    advance(_loss(net, torch.ones(2, 4), 0, (0, 1, 2)), optimizer, run=accelerator)
    return str(found.value)


@pytest.mark.parametrize("orders", [((0, 1), (0, 2)), ((0, 2, 1), (0, 1, 2))], ids=["other", "exchanged"])
@world(2)
def test_blocks_that_differ_by_rank_are_refused(orders: Orders) -> None:
    """Torch gathers one block for the other where both have one size: the step names the first that differs."""
    names = [f"blocks.{order[1]} on rank {rank}" for rank, order in enumerate(orders)]
    assert f"got {', '.join(names)}. Nothing was updated" in _step_refused(orders)


@pytest.mark.skipif(is_torch_version(">=", "2.13"), reason="this torch reduces zeros for unused parameters")
@world(2)
def test_experts_that_differ_by_rank_are_refused() -> None:
    """Before torch 2.13, gradients of one expert are added up with those of another: the step names both."""
    message = _step_refused(((0, 1, 2), (0, 1, 2)), chosen=(0, 1))
    assert "got gradients of blocks.0.experts.0.weight on the ranks [0], " in message
    assert "blocks.0.experts.1.weight on the ranks [1]" in message


@world(2)
def test_orders_that_change_on_all_ranks_train_as_in_one_process() -> None:
    """Ranks that leave out a block, run one twice or stop adding up together go on, in orders new and known."""
    accelerator = Accelerator(fsdp_plugin=_plugin())
    net, alone = Net(), Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    expected = torch.optim.SGD(alone.parameters(), lr=0.1)
    for window, order in ((1, (0, 1, 2)), (1, (0, 2)), (2, (0, 1, 2)), (1, (0, 2)), (3, (0, 0, 1)), (2, (2, 1))):
        for batch in range(window):
            with nullcontext() if batch == window - 1 else accelerator.no_sync(net):
                accelerator.backward(_loss(net, torch.ones(2, 4), 0, order))
            _loss(alone, torch.ones(2, 4), 0, order).backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    assert_trained(accelerator, net, alone.state_dict())
