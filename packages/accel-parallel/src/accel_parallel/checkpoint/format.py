"""Checkpoints in shards, as a run without shards reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_core.checkpoint import names
from accel_core.checkpoint.format import CheckpointFormat, Run, Source
from accel_core.checkpoint.plain import PlainFormat
from accel_core.checkpoint.report import Restoration
from accel_parallel.checkpoint import models as stored_models
from accel_parallel.checkpoint import optimizers as stored_optimizers


class ShardedFormat(PlainFormat):
    """Models and optimizers go by what lies there, into whole models and into such as are spread in place.

    What is written is whole.
    """

    def recognises(self, source: Source) -> bool:
        """Return whether FSDP wrote the models: in shards, whole under its own names, or rank by rank."""
        return any(names.engine_of(name) == "FSDP" for name in source.files())

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare with the models, changing nothing, and return how each is restored."""
        return [stored_models.restoration(own, index, source, run.world.rank) for index, own in enumerate(models)]

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare with the optimizers, changing nothing, and return how each is restored."""
        return [
            stored_optimizers.restoration(
                stored_optimizers.named_optimizer(own, run.models), index, source, run.world.rank
            )
            for index, own in enumerate(run.optimizers)
        ]


SHARDED: CheckpointFormat = ShardedFormat()
"""The format of what FSDP wrote, for runs of any other strategy."""
