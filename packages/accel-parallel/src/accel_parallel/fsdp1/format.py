"""Checkpoints of models that FSDP1 wraps: whole, in shards, or each rank's pieces as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from accel_core.checkpoint import names
from accel_core.checkpoint.format import Part, Run, SaveRequest, Source
from accel_core.checkpoint.parts import FilePart
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.checkpoint.state_only import StateOnlyModel
from accel_core.errors import CheckpointError
from accel_parallel.checkpoint import models as stored_models
from accel_parallel.checkpoint import optimizers as stored_optimizers
from accel_parallel.checkpoint import writer
from accel_parallel.checkpoint.optimizers import NamedOptimizer
from accel_parallel.fsdp1 import flat, states
from accel_parallel.sharding.format import FullyShardedFormat

__all__ = ["WrappedFormat", "named_optimizer"]


class _Owner(Protocol):
    """Finds the FSDP modules, and gathers and distributes whole states, for which every rank calls it."""

    def wrapper_of(self, model: torch.nn.Module) -> torch.nn.Module | None: ...

    def wrapper_under(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None: ...

    def ties_of(self, model: torch.nn.Module) -> list[list[str]]: ...

    def order(self, wrapper: torch.nn.Module, named: dict[str, Any]) -> list[str]: ...

    def held_state(self, wrapper: torch.nn.Module) -> dict[str, Any] | None: ...

    def whole_state(self, model: torch.nn.Module, *, keep: bool) -> dict[str, Any]: ...

    def load_whole_state(self, model: torch.nn.Module, state: dict[str, Any]) -> None: ...

    def whole_optimizer(self, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]: ...

    def whole_named(self, wrapper: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]: ...

    def whole_shapes(self, wrapper: torch.nn.Module) -> dict[str, torch.Size]: ...

    def load_whole_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None: ...


class WrappedFormat(FullyShardedFormat):
    """Compares models and optimizers by original parameters: flattened pieces have other names and shapes."""

    def __init__(self, kind: str, owner: _Owner) -> None:
        super().__init__(kind, owner.whole_optimizer)
        self._owner = owner

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
        wrapper = self._owner.wrapper_of(model)
        if wrapper is None:
            return super().state_of(model)
        if not states.in_shards(wrapper):
            return self._owner.whole_state(model, keep=True)
        return self._owner.held_state(wrapper) or states.state_of(wrapper)

    def optimizer_of(self, optimizer: torch.optim.Optimizer, models: Sequence[Any]) -> dict[str, Any]:
        """Return an optimizer's state by parameter names, with this rank's part of each tensor; every rank calls it."""
        wrapper = self._owner.wrapper_under(optimizer)
        if wrapper is None:
            return super().optimizer_of(optimizer, models)
        if states.in_shards(wrapper):
            held = self._owner.held_state(wrapper)
            if held is not None:
                return flat.optimizer_state(optimizer, wrapper, held)
            return states.optimizer_of(wrapper, states.inside(optimizer))
        state = self._owner.whole_optimizer(optimizer, True)
        order = [name for group in self._named(optimizer, wrapper).names for name in group]
        return {
            "state": {order[place]: entries for place, entries in state["state"].items()},
            "param_groups": [
                {**group, "params": [order[place] for place in group["params"]]} for group in state["param_groups"]
            ],
        }

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> list[Restoration]:
        """Compare the checkpoint with the models, without changing them, and return how to restore each."""
        return [self._model(own, index, source, run) for index, own in enumerate(models)]

    def _model(self, own: Any, index: int, source: Source, run: Run) -> Restoration:
        if stored_models.holds_local(source, index):
            return self._local(own, index, source, run)
        wrapper, rank = self._owner.wrapper_of(own), run.world.rank
        if wrapper is None or not states.in_shards(wrapper):
            whole = StateOnlyModel(self._owner.whole_state(own, keep=True), self._owner.ties_of(own))
            return _then(
                stored_models.restoration(whole, index, source, rank),
                lambda: self._owner.load_whole_state(own, whole.state),
            )
        held = None if source.model_kwargs else self._owner.held_state(wrapper)
        stand = StateOnlyModel(states.state_of(wrapper) if held is None else held, self._owner.ties_of(own))
        plan = stored_models.restoration(stand, index, source, rank)
        # What is held are the weights themselves; what torch made of them has to be put back.
        return plan if held is not None else _then(plan, lambda: states.load_state(wrapper, stand.state))

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
            stored = source.read(name)
        except (CheckpointError, OSError) as error:
            return Restoration(component, findings=[finding_of(error, component, rank)])
        held = states.local_tensors(own)
        problems = _differences(stored, held)
        findings = [Finding(component, "mismatch", detail, rank) for detail in problems]

        @torch.no_grad()
        def apply() -> None:
            for key, tensor in held.items():
                tensor.copy_(stored[key])  # in place, as others hold these tensors

        return Restoration(component, apply, findings, files=frozenset({name}))

    def optimizer_restorations(self, run: Run, source: Source) -> list[Restoration]:
        """Compare the checkpoint with the optimizers, without changing them, and return how to restore each."""
        found: list[Restoration] = []
        for index, own in enumerate(run.optimizers):
            wrapper = self._owner.wrapper_under(own)
            seen = stored_optimizers.named_optimizer(own, run.models) if wrapper is None else self._named(own, wrapper)
            found.append(stored_optimizers.restoration(seen, index, source, run.world.rank))
        return found

    def _named(self, own: torch.optim.Optimizer, wrapper: torch.nn.Module) -> NamedOptimizer:
        """Return an optimizer of a wrapped model by the names of its parameters, which have shapes and no values."""
        if states.in_shards(wrapper):
            held = self._owner.held_state(wrapper)
            if held is not None:
                return flat.named_optimizer_of(own, wrapper, held)
            return named_optimizer(own, wrapper, partial(self._owner.order, wrapper))
        shapes = self._owner.whole_shapes(wrapper)
        like = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        named = self._owner.whole_named(wrapper, own)
        order = self._owner.order(wrapper, named)
        return _seen(named, order, like, lambda _: partial(self._owner.load_whole_optimizer, own))


def _then(plan: Restoration, finish: Callable[[], None]) -> Restoration:
    """Return a plan that does something more at its end."""

    def apply() -> None:
        plan.apply()
        finish()

    return replace(plan, apply=apply)


def named_optimizer(
    own: torch.optim.Optimizer, wrapper: torch.nn.Module, order: Callable[[dict[str, Any]], list[str]]
) -> NamedOptimizer:
    """Return an optimizer of a model that is wrapped in shards by the names of its parameters; every rank calls it."""
    inside = states.inside(own)
    named = states.optimizer_of(wrapper, inside)
    return _seen(
        named, order(named), states.state_of(wrapper), lambda given: partial(_load_by_names, wrapper, inside, given)
    )


def _seen(
    named: dict[str, Any],
    order: list[str],
    like: dict[str, torch.Tensor],
    load: Callable[[list[list[str]]], Callable[[dict[str, Any]], None]],
) -> NamedOptimizer:
    groups = [{**g, "params": [n for n in order if n in set(g["params"])]} for g in named["param_groups"]]
    given = [list(group["params"]) for group in groups]
    shown = [{**group, "params": [like[name] for name in group["params"]]} for group in groups]
    return NamedOptimizer(shown, given, like, load(given))


def _load_by_names(
    wrapper: torch.nn.Module, inside: torch.optim.Optimizer, given: list[list[str]], state: dict[str, Any]
) -> None:
    """Load a state whose parameters have any keys, in the order of `given`, their names."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    names_of = dict(zip(keys, (name for group in given for name in group), strict=True))
    # Pieces of one parameter may share its step count, which each would move for itself.
    named = {
        "state": {
            names_of[key]: {name: value.clone() if _is_count(value) else value for name, value in entries.items()}
            for key, entries in state["state"].items()
            if key in names_of
        },
        "param_groups": [{**g, "params": list(own)} for g, own in zip(state["param_groups"], given, strict=True)],
    }
    states.load_optimizer(wrapper, inside, named)


def _is_count(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _differences(stored: object, held: dict[str, torch.Tensor]) -> list[str]:
    if not isinstance(stored, dict):
        return [f"the file holds a {type(stored).__name__} instead of a dict"]
    found = [f"{name} is not in the checkpoint" for name in held if name not in stored]
    found += [f"{name} is not in the model" for name in stored if name not in held]
    for name in held.keys() & stored.keys():
        value, own = stored[name], held[name]
        if not isinstance(value, torch.Tensor) or value.shape != own.shape or value.dtype != own.dtype:
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            found.append(f"{name} is {got} instead of {own.dtype} {tuple(own.shape)}")
    return sorted(found)
