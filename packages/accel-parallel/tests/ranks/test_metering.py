"""The meter of training steps where ranks hold parts of the model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from several_ranks import Net, advance, blocks, fsdp, split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from accel_core.accelerator import Accelerator
from accel_core.plugins.handlers import MeterKwargs
from accel_core.plugins.parallelism import ParallelismConfig
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_testing import requires, world

WIDTH, NAP = 16, 0.05


class Layers(nn.Module):
    """Two layers that add to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """Add something."""
        found: Tensor = values + self.down(self.up(values).relu())
        return found


def net() -> Net:
    """Return blocks after a layer."""
    made = Net(entry=WIDTH, width=WIDTH, block=Layers)
    made.leave = nn.Identity()  # type: ignore[assignment]
    return made


class Rows(Dataset[Any]):
    """Rows of numbers, each after a moment."""

    def __init__(self, nap: float = 0.0) -> None:
        self.nap = nap

    def __len__(self) -> int:
        """Return how many there are."""
        return 48

    def __getitem__(self, index: int) -> Tensor:
        """Return one."""
        time.sleep(self.nap)
        return torch.full((WIDTH,), index / 10)


def given_for(kind: str, **settings: Any) -> dict[str, Any]:
    """Return the arguments of an Accelerator that trains in one of the ways, with a meter."""
    handlers: list[Any] = [MeterKwargs(every=1, **settings)]
    given: dict[str, Any] = {"kwargs_handlers": handlers}
    if kind.startswith("fsdp"):
        again = kind.endswith("again")
        given["fsdp_plugin"] = fsdp(int(kind[4]), **blocks("Layers"), activation_checkpointing=again)
    if kind == "tp":
        given["parallelism_config"] = split({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    if kind == "pp":
        given["parallelism_config"] = ParallelismConfig(pp_size=2)
        handlers.append(PipelineKwargs(loss_fn=lambda out, _: out.square().mean(), microbatches=2))
    return given


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2 again", "fsdp1", "tp", "pp"])
@world(2, quiet=20)
def test_flops_of_all_ranks_are_those_of_one_model(kind: str) -> None:
    """Each rank counts what it computes: with shards its own batch, else its part; recomputation does not count."""
    if kind == "pp":
        requires("torch:2.13")
    accelerator = Accelerator(cpu=True, **given_for(kind))
    torch.manual_seed(0)
    model: Any = net()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Rows(), batch_size=4)
    )
    for batch in loader:
        out = model(batch)
        advance(out.loss if kind == "pp" else out.square().mean(), optimizer, run=accelerator)
    with FlopCounterMode(display=False) as counter:
        net()(torch.rand(4, WIDTH)).square().mean().backward()
    assert accelerator.meter is not None
    found = accelerator.meter.last
    assert found is not None
    replicas = 2 if kind.startswith("fsdp") else 1
    expected = replicas * counter.get_total_flops()
    with FlopCounterMode(display=False) as entering:
        loss = nn.Linear(WIDTH, WIDTH)(torch.rand(4, WIDTH)).sum()
        if kind == "tp":
            loss.backward()
    if kind in ("tp", "pp"):  # what is not split, each of the ranks computes; a later stage, forward alone
        expected += entering.get_total_flops()
    assert found.flops == expected
    assert found.samples_per_second == pytest.approx(4 * replicas / found.seconds)


@world(2)
def test_a_rank_that_reads_slowly_is_named_under_shards() -> None:
    """Where a rank waits for another inside of its forward pass, the one that waits for data is the slower one."""
    slow = Accelerator(cpu=True, **given_for("fsdp2", flops=None))
    model: Any = net()
    model, optimizer, loader = slow.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(Rows(NAP * slow.process_index), batch_size=4),
    )
    for batch in loader:
        slow.backward(model(batch).square().mean())
        optimizer.step()
    assert slow.meter is not None
    found = slow.meter.last
    assert found is not None
    assert found.slowest_rank == 1
    assert found.slowest_seconds >= 4 * NAP
