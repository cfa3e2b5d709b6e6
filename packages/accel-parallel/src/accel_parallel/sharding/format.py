"""How sharded models and optimizers lie in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel_core.checkpoint import names, selection
from accel_core.checkpoint.format import Part, Run, SaveRequest, Source
from accel_core.checkpoint.plain import PLAIN
from accel_core.checkpoint.plain import parts as whole_parts
from accel_core.errors import StateError
from accel_core.modules.unwrap import canonical_state_dict
from accel_parallel.checkpoint import writer
from accel_parallel.checkpoint.format import ShardedFormat
from accel_parallel.checkpoint.optimizers import state_by_names


class FullyShardedFormat(ShardedFormat):
    """Models and optimizers in shards, or whole as one process writes them; read by what lies there.

    So what was saved here continues under any other strategy and number of ranks, and the other way round.
    """

    has_adapters_apart = True

    def __init__(self, kind: str, whole_optimizer: Callable[[Any, bool], dict[str, Any]]) -> None:
        self.kind = kind
        self._whole_optimizer = whole_optimizer
        self._plans = writer.Plans()

    def recognises(self, source: Source) -> bool:
        """Return whether there are models as FSDP writes them or as one process does."""
        return super().recognises(source) or PLAIN.recognises(source)

    def weights(self, run: Run) -> list[dict[str, Any]]:
        """Return whole state dicts of the models on the ranks that write; of models in shards, nothing."""
        return super().weights(run) if self.kind == "FULL_STATE_DICT" else []

    def parts(self, request: SaveRequest) -> list[Part]:
        """Return what this rank writes; see `CheckpointFormat.parts`."""
        if self.kind == "FULL_STATE_DICT":
            return self._whole(request)
        run = request.run
        own = selection.restricted(request.kept, [self.state_of(model) for model in run.models])
        models = {names.sharded(names.FSDP_MODEL_NAME, index): {"model": state} for index, state in enumerate(own)}
        states = models | self._optimizers(run)
        return [*writer.plan(states, run.world.rank, request.exchange, plans=self._plans)]

    def _optimizers(self, run: Run) -> dict[str, Mapping[str, Any]]:
        """Return the states of the optimizers, in shards and by names, by the names of their folders."""
        return {
            names.sharded(names.OPTIMIZER_NAME, index): {"optimizer": self.optimizer_of(own, run.models)}
            for index, own in enumerate(run.optimizers)
        }

    def state_of(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return a model's state by its bare names, with this rank's part of each tensor; every rank calls it."""
        return canonical_state_dict(model)

    def optimizer_of(self, optimizer: torch.optim.Optimizer, models: Sequence[Any]) -> dict[str, Any]:
        """Return an optimizer's state by parameter names, with this rank's part of each tensor; every rank calls it."""
        return state_by_names(optimizer, models)

    def _whole(self, request: SaveRequest) -> list[Part]:
        states = [self._whole_optimizer(own, request.writes) for own in request.run.optimizers]
        if not request.writes:
            return []
        if not all(request.weights):
            raise StateError(
                "The first rank of each machine writes whole weights; got none on one that writes. "
                "Start the processes of a machine with consecutive ranks."
            )
        return whole_parts(request.weights, states, safe=request.safe)
