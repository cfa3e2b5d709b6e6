"""Checkpoints in shards, as a run without shards reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel_core.checkpoint import names
from accel_core.checkpoint.format import CheckpointFormat, Run, Source
from accel_core.checkpoint.plain import PlainFormat
from accel_core.checkpoint.report import Restoration
from accel_parallel.checkpoint import models as stored_models
from accel_parallel.checkpoint import optimizers as stored_optimizers
from accel_parallel.checkpoint.optimizers import NamedOptimizer


class ShardedFormat(PlainFormat):
    """Models and optimizers go by what lies there, into whole models and into such as are spread in place.

    What is written is whole.
    """

    def recognises(self, source: Source) -> bool:
        """Return whether FSDP wrote the models: in shards, whole under its own names, or rank by rank."""
        return any(names.engine_of(name) == "FSDP" for name in source.files())

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare with the models, changing nothing, and return how each is restored."""
        return [self.restoration_of(own, index, source, run) for index, own in enumerate(models)]

    def restoration_of(self, model: nn.Module, index: int, source: Source, run: Run) -> Restoration:
        """Return how a model is restored; every rank calls it."""
        return stored_models.restoration(model, index, source, run.world.rank)

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare with the optimizers, changing nothing, and return how each is restored."""
        named = [self.named(own, run.models) for own in run.optimizers]
        return [stored_optimizers.restoration(own, index, source, run.world.rank) for index, own in enumerate(named)]

    def named(self, optimizer: Optimizer, models: Sequence[Any]) -> NamedOptimizer:
        """Return an optimizer by the names of its parameters; every rank calls it."""
        return stored_optimizers.named_optimizer(optimizer, models)


SHARDED: CheckpointFormat = ShardedFormat()
"""The format of what FSDP wrote, for runs of any other strategy."""
