"""How models in a pipeline, and their optimizers, lie in a checkpoint: as shards, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel_core.checkpoint.format import Run, Source
from accel_core.checkpoint.report import Restoration
from accel_core.modules.unwrap import canonical_name
from accel_parallel.checkpoint.optimizers import NamedOptimizer
from accel_parallel.pipeline.run import Pipeline
from accel_parallel.sharding.format import FullyShardedFormat


class PipelinedFormat(FullyShardedFormat):
    """Each rank writes and reads what it holds; of what several hold, one writes."""

    def __init__(self, pipeline_of: Callable[[Any], Pipeline]) -> None:
        super().__init__("SHARDED_STATE_DICT", lambda own, keep: {})
        self._pipeline_of = pipeline_of

    def restoration_of(self, model: nn.Module, index: int, source: Source, run: Run) -> Restoration:
        """Return how what this rank holds of a model is restored; every rank calls it."""
        others = {f"{name} is not in the model" for name in map(canonical_name, self._pipeline_of(model).tensors())}
        found = super().restoration_of(model, index, source, run)
        found.findings = [each for each in found.findings if each.kind != "unexpected" or each.detail not in others]
        return found

    def named(self, optimizer: Optimizer, models: Sequence[Any]) -> NamedOptimizer:
        """Return an optimizer by the names of its parameters, and with the state of what is held here."""
        elsewhere = set[int]().union(*(self._pipeline_of(model).elsewhere for model in models))
        found = super().named(optimizer, models)
        held = frozenset(name for name, parameter in found.like.items() if id(parameter) not in elsewhere)
        return replace(found, held=held, load_state_dict=_loading(optimizer, elsewhere))


def _loading(own: Any, elsewhere: set[int]) -> Callable[[dict[str, Any]], None]:
    """Return what loads a state dict without the state of parameters that other ranks hold."""

    def load(state: dict[str, Any]) -> None:
        keys = [key for group in state["param_groups"] for key in group["params"]]
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        kept = {key for key, each in zip(keys, parameters, strict=True) if id(each) not in elsewhere}
        own.load_state_dict({**state, "state": {key: each for key, each in state["state"].items() if key in kept}})

    return load
