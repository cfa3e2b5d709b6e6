"""How models in a pipeline, and their optimizers, lie in a checkpoint: as shards, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from accel_core.checkpoint.format import Run, Source
from accel_core.checkpoint.report import Restoration
from accel_core.modules.unwrap import canonical_name
from accel_parallel.checkpoint import models as stored_models
from accel_parallel.checkpoint import optimizers as stored_optimizers
from accel_parallel.pipeline.run import Pipeline
from accel_parallel.sharding.format import FullyShardedFormat


class PipelinedFormat(FullyShardedFormat):
    """Each rank writes and reads what it holds; of what several hold, one writes."""

    def __init__(self, pipeline_of: Callable[[Any], Pipeline]) -> None:
        super().__init__("SHARDED_STATE_DICT", lambda own, keep: {})
        self._pipeline_of = pipeline_of

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare with what this rank holds of the models, changing nothing, and return how each is restored."""
        found = []
        for index, own in enumerate(models):
            others = {f"{name} is not in the model" for name in map(canonical_name, self._pipeline_of(own).tensors())}
            restoration = stored_models.restoration(own, index, source, run.world.rank)
            restoration.findings = [
                each for each in restoration.findings if each.kind != "unexpected" or each.detail not in others
            ]
            found.append(restoration)
        return found

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare with the optimizers, changing nothing, and return how the state of what is held here is restored."""
        elsewhere = set[int]().union(*(self._pipeline_of(model).elsewhere for model in run.models))
        found = []
        for index, own in enumerate(run.optimizers):
            named = stored_optimizers.named_optimizer(own, run.models)
            held = frozenset(name for name, parameter in named.like.items() if id(parameter) not in elsewhere)
            named = replace(named, held=held, load_state_dict=_loading(own, elsewhere))
            found.append(stored_optimizers.restoration(named, index, source, run.world.rank))
        return found


def _loading(own: Any, elsewhere: set[int]) -> Callable[[dict[str, Any]], None]:
    """Return what loads a state dict without the state of parameters that other ranks hold."""

    def load(state: dict[str, Any]) -> None:
        keys = [key for group in state["param_groups"] for key in group["params"]]
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        kept = {key for key, each in zip(keys, parameters, strict=True) if id(each) not in elsewhere}
        own.load_state_dict({**state, "state": {key: each for key, each in state["state"].items() if key in kept}})

    return load
