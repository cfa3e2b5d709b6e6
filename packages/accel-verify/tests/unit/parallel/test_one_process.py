"""One process that reads what several ranks read."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accel_core.accelerator import Accelerator
from accel_core.data.loader import DataLoaderShard
from accel_core.errors import DataError
from accel_verify.parallel.one_process import _by_share, _Joined, _joined

pytestmark = pytest.mark.usefixtures("fresh_state")


class Stream(IterableDataset):
    """Ten numbers."""

    def __iter__(self) -> Iterator[int]:
        """Yield them."""
        yield from range(10)


class Own(BatchSampler):
    """A batch sampler of the user's own kind."""


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(10), batch_size=2),
        DataLoader(Stream(), batch_size=2),
        DataLoader(range(10), batch_sampler=Own(SequentialSampler(range(10)), 2, False)),
    ],
    ids=["map", "stream", "own sampler"],
)
def test_batches_of_all_ranks_come_as_one(loader: DataLoader) -> None:
    """Two by two, in their order, the last one alone; the loader itself stays as it is."""
    joined = _joined(Accelerator(cpu=True), loader, 2)
    assert [batch.tolist() for batch in joined] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(batch) for batch in loader] == [2, 2, 2, 2, 2]


def test_an_incomplete_group_is_dropped_where_the_loader_drops() -> None:
    """As ranks drop it, in length too."""
    sampler = Own(SequentialSampler(range(10)), 2, True)
    assert (list(_Joined(sampler, 2)), len(_Joined(sampler, 2))) == ([[0, 1, 2, 3], [4, 5, 6, 7]], 2)


def test_the_order_is_drawn_as_ranks_draw_it() -> None:
    """A shuffled loader gets a generator whose seed comes from the default one."""
    orders = []
    for _ in range(2):
        torch.manual_seed(3)
        joined = _joined(Accelerator(cpu=True), DataLoader(range(10), batch_size=2, shuffle=True), 2)
        torch.manual_seed(int(torch.randint(9, ())))  # what is drawn later does not change the order
        orders.append([batch.tolist() for batch in joined])
    assert orders[0] == orders[1]
    assert isinstance(Accelerator(cpu=True).prepare(joined), DataLoaderShard)


def test_a_loader_without_batches_is_refused() -> None:
    """Nobody knows where a batch of its ends."""
    with pytest.raises(DataError, match="got a loader with batch_size=None"):
        _joined(Accelerator(cpu=True), DataLoader(Stream(), batch_size=None), 2)


def test_batch_normalization_takes_each_share_by_itself() -> None:
    """Outputs are those of two layers that see half each, running statistics those of the first."""
    plain, ours = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    forward = functools.partial(_by_share, 2, nn.BatchNorm1d.forward)
    values = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    outputs = forward(ours, values)
    first = plain(values[:4])
    assert torch.equal(ours.running_mean, plain.running_mean)
    assert torch.equal(ours.num_batches_tracked, plain.num_batches_tracked)
    assert torch.equal(outputs, torch.cat([first, nn.BatchNorm1d(3)(values[4:])]))
    assert torch.equal(forward(ours.eval(), values), ours.forward(values))
