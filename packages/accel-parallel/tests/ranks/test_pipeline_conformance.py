"""The pipeline strategy does what every strategy does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_parallel.pipeline.strategy import PipelineStrategy
from accel_testing import requires, world
from accel_testing.conformance.strategy import StrategyConformance

pytestmark = requires("torch:2.13")  # pipelines

PARTS = 2


def loss_fn(outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean over a micro-batch, or what its sum is for a mean over micro-batches."""
    errors: torch.Tensor = (outputs - batch["y"]).square()
    return (errors * batch["units"]).sum() * PARTS if batch["weighted"] else errors.mean()


def piped_loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor, units: torch.Tensor, *, weighted: bool) -> Any:
    """Return the loss that a pipeline computes."""
    return net(x, y=y, units=units, weighted=weighted).loss


class Layer(nn.Linear):
    """A layer with its nonlinearity."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of values."""
        return super().forward(values).tanh()


class Piped(StrategyConformance):
    """Three layers are two stages."""

    strategy = PipelineStrategy
    loss_of = staticmethod(piped_loss)

    def arguments(self) -> dict[str, Any]:
        """Return the axes, and how many micro-batches there are."""
        return {
            "parallelism_config": ParallelismConfig(pp_size=2, dp_replicate_size=ensure().size // 2),
            "kwargs_handlers": [PipelineKwargs(microbatches=PARTS, loss_fn=loss_fn)],
        }

    def _model(self, seed: int = 3) -> nn.Module:
        """Return a model of blocks of one class."""
        torch.manual_seed(seed)
        return nn.Sequential(Layer(4, 6), Layer(6, 6), Layer(6, 1)).to(self.dtype)


@world(2, quiet=20)
def test_a_pipeline_is_a_strategy(tmp_path: Path) -> None:
    """Two stages pass the whole suite."""
    Piped()._everything(tmp_path)


@pytest.mark.full("another case of a grid")
@world(4, quiet=30)
def test_a_pipeline_beside_its_copy_is_a_strategy(tmp_path: Path) -> None:
    """Two pipelines of two stages pass it too."""
    # A batch without rows has no micro-batches.
    Piped()._everything(tmp_path, without=("batches_without_rows_train",))
