"""Checkpoints of models that FSDP1 wraps: whole, in shards, or each rank's pieces as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accel_core.checkpoint import names
from accel_core.checkpoint.format import FilePart, Part, Run, SaveRequest, Source
from accel_core.checkpoint.model import ObjectWeights, StateOnlyModel, compare
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.errors import CheckpointError
from accel_parallel.checkpoint import models as stored_models
from accel_parallel.checkpoint import optimizers as stored_optimizers
from accel_parallel.checkpoint import writer
from accel_parallel.checkpoint.optimizers import NamedOptimizer
from accel_parallel.fsdp1 import states
from accel_parallel.sharding.format import FullyShardedFormat


class WrappedFormat(FullyShardedFormat):
    """Compares models and optimizers by original parameters: flattened pieces have other names and shapes."""

    def __init__(
        self, kind: str, whole_optimizer: Callable[[Any, bool], dict[str, Any]], wrappers: states.Wrappers
    ) -> None:
        super().__init__(kind, whole_optimizer)
        self._wrappers = wrappers

    def parts(self, request: SaveRequest) -> list[Part]:
        """Return what this rank writes; see `CheckpointFormat.parts`."""
        if self.kind != "LOCAL_STATE_DICT":
            return super().parts(request)
        run, rank = request.run, request.run.world.rank
        local = [  # pieces mean something on their own rank alone
            FilePart(names.local_model_name(index, rank), "object", states.local_tensors(own))
            for index, own in enumerate(run.models)
        ]
        return [*local, *writer.plan(self._optimizers(run), rank, request.exchange, plans=self._plans)]

    def state_of(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return a model's state under its bare names, with this rank's part of each tensor; every rank calls it."""
        return states.own_state(model, self._wrappers.of(model))

    def optimizer_of(self, optimizer: torch.optim.Optimizer, models: Sequence[Any]) -> dict[str, Any]:
        """Return an optimizer's state by parameter names, with this rank's part of each tensor; every rank calls it."""
        return states.own_optimizer_state(optimizer, models, self._wrappers.under(optimizer))

    def restoration_of(self, model: torch.nn.Module, index: int, source: Source, run: Run) -> Restoration:
        """Return how a model is restored; every rank calls it."""
        if stored_models.holds_local(source, index):
            return self._local(model, index, source, run)
        wrapper = self._wrappers.of(model)
        if wrapper is None:
            return super().restoration_of(model, index, source, run)
        stand = StateOnlyModel(states.state_of(wrapper), self._wrappers.ties_of(model))
        plan = stored_models.restoration(stand, index, source, run.world.rank)

        def apply() -> None:
            plan.apply()
            states.load_state(wrapper, stand.state)

        return replace(plan, apply=apply)

    def _local(self, own: Any, index: int, source: Source, run: Run) -> Restoration:
        """Compare what this rank held with what it holds now: as many ranks, flattened in the same way."""
        component, rank = f"model {index}", run.world.rank
        if source.world_size != run.world.size:
            detail = (
                f"was saved by {source.world_size} ranks, each with its own part (LOCAL_STATE_DICT), and "
                f"{run.world.size} load it: load it on {source.world_size} ranks and save with "
                "state_dict_type='SHARDED_STATE_DICT'"
            )
            return Restoration(component, findings=[Finding(component, "mismatch", detail, rank)])
        name = names.local_model_name(index, rank)
        try:
            source.check_listed(name)
            stored = ObjectWeights(source.folder, name)
        except (CheckpointError, OSError) as error:
            return Restoration(component, findings=[finding_of(error, component, rank)])
        # Read in place, as others hold these tensors.
        found = compare(StateOnlyModel(states.local_tensors(own)), stored, component, rank)
        return replace(found, files=frozenset({name}))

    def named(self, optimizer: torch.optim.Optimizer, models: Sequence[Any]) -> NamedOptimizer:
        """Return an optimizer by the names of its parameters; every rank calls it."""
        return named_optimizer(optimizer, models, self._wrappers.under(optimizer))


def named_optimizer(
    own: torch.optim.Optimizer, models: Sequence[Any], wrapper: torch.nn.Module | None
) -> NamedOptimizer:
    """Return an optimizer, of a wrapped model or others, by the names of its parameters; every rank calls it."""
    if wrapper is None:
        return stored_optimizers.named_optimizer(own, models)
    like = states.state_of(wrapper)
    given = stored_optimizers.names_of(own, [wrapper])
    shown = [{**g, "params": [like[name] for name in names]} for g, names in zip(own.param_groups, given, strict=True)]
    return NamedOptimizer(shown, given, like, partial(_load_by_names, wrapper, own, given))


def _load_by_names(
    wrapper: torch.nn.Module, own: torch.optim.Optimizer, given: list[list[str]], state: dict[str, Any]
) -> None:
    """Load a state whose parameters have any keys, in the order of `given`, their names."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    names_of = dict(zip(keys, (name for group in given for name in group), strict=True))
    named = {
        "state": {names_of[key]: entries for key, entries in state["state"].items() if key in names_of},
        "param_groups": [{**g, "params": list(names)} for g, names in zip(state["param_groups"], given, strict=True)],
    }
    states.load_optimizer(wrapper, own, named)
