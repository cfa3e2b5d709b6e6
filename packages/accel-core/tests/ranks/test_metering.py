"""The meter of training steps on several ranks that hold copies of the model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accel_core import metering
from accel_core.accelerator import Accelerator
from accel_core.comm.control import Channel
from accel_core.errors import RankDisagreementError
from accel_core.plugins.handlers import MeterKwargs
from accel_core.process import world as process_world
from accel_testing import world
from accel_testing.limits import slowness

NAP = 0.05


class Rows(Dataset[Any]):
    """Rows with a mask of as many tokens as their number, each after a moment on one of the ranks."""

    def __init__(self, count: int, nap: float) -> None:
        self.count, self.nap = count, nap

    def __len__(self) -> int:
        """Return how many there are."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one."""
        time.sleep(self.nap)
        return {"ids": torch.full((16,), index / 10), "attention_mask": (torch.arange(16) < index).long()}


def prepared(count: int, slow: int = -1, **given: Any) -> Any:
    """Return an Accelerator with a meter, a model, an optimizer and a loader that is slow on one rank."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[MeterKwargs(tokens="ids", **given)])
    layer = nn.Linear(16, 1)
    rows = Rows(count, NAP * slowness() if accelerator.process_index == slow else 0.0)  # longer than others are held up
    return accelerator, *accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1), DataLoader(rows, batch_size=4)
    )


def train(accelerator: Any, layer: Any, optimizer: Any, loader: Any) -> None:
    """Train an epoch, with weights for the losses."""
    for batch in loader:
        accelerator.backward(layer(batch["ids"]).sum(), weight=len(batch["ids"]))
        optimizer.step()
        optimizer.zero_grad()


@world(2)
def test_ranks_have_the_same_numbers_and_name_the_slowest() -> None:
    """A rank that reads slowly is named, the other waits for it in the exchange, and both have the same numbers."""
    accelerator, *rest = prepared(48, slow=1, every=6)
    train(accelerator, *rest)
    found = accelerator.meter.last
    assert Channel(accelerator._runtime.world, "comparing").exchange(found) == [found] * 2
    assert found.steps == 5
    assert found.slowest_rank == 1
    assert found.waiting >= 4 * NAP / 2  # the mean over both
    assert found.exchange >= NAP
    assert found.slowest_seconds >= 4 * NAP
    assert found.samples_per_second == pytest.approx(8 / found.seconds)


@world(2)
def test_samples_that_only_fill_up_do_not_count() -> None:
    """The last of two steps has 3 samples of 8, so both ranks together count 3 and their tokens."""
    accelerator, *rest = prepared(11, every=2, flops=None)
    train(accelerator, *rest)
    found = accelerator.meter.last
    assert found.steps == 1
    assert found.samples_per_second == pytest.approx(3 / found.seconds)
    assert found.tokens_per_second == pytest.approx((8 + 9 + 10) / found.seconds)


@world(2)
def test_ranks_with_unequal_batches_meet_after_them() -> None:
    """Inside of `join_uneven_inputs` nothing is exchanged; behind it the numbers are there, and training goes on."""
    accelerator, layer, optimizer, loader = prepared(20, every=1)
    with accelerator.join_uneven_inputs([layer], even_batches=False):
        for batch in loader:
            accelerator.backward(layer(batch["ids"]).sum())
            optimizer.step()
        assert accelerator.meter.last is None
    found = accelerator.meter.last
    assert found.steps == 2  # of 3 on the first rank, without the first one
    train(accelerator, layer, optimizer, loader)
    assert accelerator.meter.last != found


@world(2)
def test_an_exchange_in_the_loop_counts_as_one() -> None:
    """The time in which one rank waits for the other in a `gather` is that of an exchange."""
    accelerator, layer, optimizer, loader = prepared(32, every=4)
    nap = NAP * slowness()  # longer than the other rank is held up
    for batch in loader:
        accelerator.backward(layer(batch["ids"]).sum())
        time.sleep(nap * accelerator.process_index)
        accelerator.gather(batch["ids"])
        optimizer.step()
    found = accelerator.meter.last
    assert found.exchange >= NAP / 4
    assert found.rest >= NAP / 2
    assert found.slowest_rank == 1


@world(2)
def test_a_meter_on_one_rank_alone_is_refused() -> None:
    """The rank that has one names the other, and meets no gradients of it with its own numbers."""
    metering._ARRIVAL = 1.0
    main = process_world.ensure().rank == 0
    accelerator = Accelerator(cpu=True, kwargs_handlers=[MeterKwargs(every=2)] if main else [])
    layer = nn.Linear(16, 1)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for step in range(3):
        accelerator.backward(layer(torch.ones(4, 16)).sum())
        if main and step == 1:
            with pytest.raises(RankDisagreementError, match=r"MeterKwargs\(every=2\).*rank 1 did not come"):
                optimizer.step()
        else:
            optimizer.step()
