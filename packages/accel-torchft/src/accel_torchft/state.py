"""What a replica that comes takes over from a living one: all that makes the next step the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from accel_core.checkpoint import rng
from accel_core.errors import CheckpointMismatchError
from accel_core.mesh.tensor import is_spread, local_memory, spread_over
from accel_core.runtime import Runtime


def capture(runtime: Runtime) -> dict[str, Any]:
    """Return the state of a run, of tensors in shards what this rank holds; weights are not copied.

    Buffers are, as a forward pass changes them while they are sent.
    """
    run = runtime.to_save()
    _part(run.models)
    return {
        "models": [
            {name: each.clone() if name.startswith("buffer ") else each.detach() for name, each in _tensors(model)}
            for model in run.models
        ],
        "optimizers": [tree_map(_held, optimizer.state_dict()) for optimizer in run.optimizers],
        "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in run.schedulers],
        "custom": [copy.deepcopy(each.state_dict()) for each in run.custom_objects],
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "random": rng.collect(run.world),
        "step": run.step,
        "saves": run.project.iteration,
    }


def restore(runtime: Runtime, state: dict[str, Any]) -> None:
    """Take over what `capture` returned in another replica.

    Raises:
        CheckpointMismatchError: That replica has other objects.
    """
    run = runtime.to_save()
    _part(run.models)
    for kind, own in (("models", run.models), ("optimizers", run.optimizers), ("schedulers", run.schedulers)):
        _check(kind, len(state[kind]), len(own))
    _check("registered objects", len(state["custom"]), len(run.custom_objects))
    for number, (model, held) in enumerate(zip(run.models, state["models"], strict=True)):
        tensors = dict(_tensors(model))
        shapes = ({name: each.shape for name, each in found.items()} for found in (held, tensors))
        _check(f"tensors of model {number}", *shapes)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(held[name])
    for optimizer, found in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(_spread(found, optimizer))
    for own, found in zip(run.schedulers + run.custom_objects, state["schedulers"] + state["custom"], strict=True):
        own.load_state_dict(found)
    if run.scaler is not None and state["scaler"] is not None:
        run.scaler.load_state_dict(state["scaler"])
    rng.restore(state["random"], run.world)
    runtime.step, run.project.iteration = state["step"], state["saves"]


def _part(models: list[torch.nn.Module]) -> None:
    """Let go of what a forward pass without a backward pass left whole of parameters in shards."""
    for module in (each for model in models for each in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, local_memory(each)) for name, each in model.named_parameters())
    yield from ((f"buffer {name}", local_memory(each)) for name, each in model.named_buffers())


def _held(value: object) -> object:
    return local_memory(value) if isinstance(value, torch.Tensor) else value


def _spread(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Give what belongs to a parameter in shards its form."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if not any(map(is_spread, parameters)):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    like = dict(zip(numbers, parameters, strict=True))

    def formed(value: object, parameter: torch.Tensor) -> object:
        fits = isinstance(value, torch.Tensor) and value.dim() and value.shape == local_memory(parameter).shape
        return spread_over(value, parameter) if fits else value  # type: ignore[arg-type]

    kept = {
        number: {key: formed(value, like[number]) for key, value in held.items()}
        for number, held in state["state"].items()
    }
    return {**state, "state": kept}


def _check(what: str, there: object, here: object) -> None:
    if there != here:
        raise CheckpointMismatchError(
            f"A replica takes over the state of another one, which has the same {what}; got {there} there, and {here} "
            "here. Prepare and register the same objects in every replica before the first batch."
        )
