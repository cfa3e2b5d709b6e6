"""What `accel plan --train` says of a pipeline is what ranks need."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from accel_core.host.versions import is_torch_version
from accel_core.mesh.spec import parse_layout
from accel_core.process.world import ensure
from accel_core.testing import world

pytest.importorskip("accel_parallel")
from accel_bigmodel.meta import init_empty_weights
from accel_core.accelerator import Accelerator
from accel_core.plugins.parallelism import ParallelismConfig
from accel_parallel.pipeline.kwargs import SCHEDULES, PipelineKwargs
from accel_plan.live_bytes import LiveBytes
from accel_plan.training.prediction import predict
from accel_plan.training.timeline import order_of
from accel_plan.training.workload import TrainingWorkload

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="several ranks are planned from torch 2.13 on")

WIDTH, ROWS, PARTS = 64, 512, 4


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of it."""
        return self.down(self.up(x).relu())


class Net(nn.Module):
    """Blocks between a layer in and a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(8))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many numbers."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def meta() -> nn.Module:
    """Return the model without weights."""
    with init_empty_weights():
        return Net()


def squares(output: torch.Tensor, _: object) -> torch.Tensor:
    """Return a loss."""
    return output.square().mean()


def watched(done: list[tuple[int, str, int]]) -> type[PipelineStage]:
    """Return a class of stages that write down what they compute."""

    class Stage(PipelineStage):
        def forward_one_chunk(self, part: int, *args: Any, **kwargs: Any) -> Any:
            done.append((self.stage_index, "F", part))
            return super().forward_one_chunk(part, *args, **kwargs)

        def backward_one_chunk(
            self, part: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            done.append((self.stage_index, "B" if full_backward else "I", part))
            super().backward_one_chunk(part, loss, full_backward, last_backward)

        def backward_weight_one_chunk(self, part: int, last_backward: bool = False) -> None:
            done.append((self.stage_index, "W", part))
            super().backward_weight_one_chunk(part, last_backward)

    return Stage


def measured(schedule: str, passes: int) -> tuple[int, list[tuple[int, str, int]]]:
    """Return the most bytes alive in a step of this rank, and what it computed for a batch, in which order."""
    run = Accelerator(
        parallelism_config=ParallelismConfig(pp_size=2),
        kwargs_handlers=[PipelineKwargs(schedule, PARTS, loss_fn=squares)],
        gradient_accumulation_steps=passes,
        cpu=True,
    )
    done: list[tuple[int, str, int]] = []
    with LiveBytes("all") as counter:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        model, optimizer = run.prepare(model, optimizer)
        run._runtime.strategy.pipeline_of(model).stage_type = watched(done)
        for _ in range(2):  # the second step has all buffers and the optimizer's state from its beginning
            counter.forget_peak()
            for _ in range(passes):
                batch = torch.zeros(ROWS, WIDTH)
                done.clear()
                with run.accumulate(model):
                    run.backward(model(batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
    return counter.peak, done


@world(2, quiet=20)
def as_planned(schedule: str, passes: int, peaks: tuple[int, ...]) -> None:
    """Compare on each rank."""
    peak, done = measured(schedule, passes)
    rank = ensure().rank
    assert peak / peaks[rank] == pytest.approx(1, abs=0.05)
    stages = 2 if schedule in ("gpipe", "1f1b") else 4
    assert done == order_of(schedule, 2, PARTS, stages)[rank]


@pytest.mark.parametrize(
    ("schedule", "passes"),
    [
        ("1f1b", 2),
        ("zbv_zero_bubble", 1),
        *(
            pytest.param(each, 1, marks=pytest.mark.full("another case of a grid"))
            for each in SCHEDULES
            if each not in ("1f1b", "zbv_zero_bubble")
        ),
    ],
)
def test_ranks_need_the_bytes_and_keep_the_order_of_the_plan(schedule: str, passes: int) -> None:
    """Peaks of both ranks, to a twentieth, and what each computes one after the other, are as planned without ranks."""
    workload = TrainingWorkload(
        batch=ROWS, sample=(WIDTH,), schedule=schedule, microbatches=PARTS, accumulation=passes, optimizer="SGD",
        optimizer_arguments={"momentum": 0.9}, loss=squares,
    )  # fmt: skip
    plan = predict(meta, parse_layout("pp2"), workload).pipeline
    assert plan is not None
    as_planned(schedule, passes, plan.peaks)
