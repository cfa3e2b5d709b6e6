"""Gathers and loads the whole weights of a model that stage 3 shards."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_core.checkpoint.tensor_file import SpreadWeight
from accel_core.errors import ConfigurationError
from accel_core.modules.unwrap import canonical_name

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether stage 3 has sharded the parameters of a model."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def is_split(engine: DeepSpeedEngine) -> bool:
    """Return whether DeepSpeed's own tensor parallelism has split the layers of a model over ranks."""
    return hasattr(engine, "autotp_size") and engine.autotp_size() > 1


def joined(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the state of a model whose layers are split: whole on the first rank; the others keep their parts."""
    found = engine._consolidated_16bit_state_dict() or {}
    return {canonical_name(name): found.get(name, value) for name, value in engine.module.state_dict().items()}


def refuse_ungathered(engine: DeepSpeedEngine) -> None:
    """Refuse to gather the weights of an engine whose configuration does not allow it."""
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise ConfigurationError(
            "Stage 3 shards the weights, and gathers them only if the configuration says so; got "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save=false. Set it to true "
            "(DeepSpeedPlugin(zero3_save_16bit_model=True), --zero3_save_16bit_model true), or use save_state."
        )


def state_of(engine: DeepSpeedEngine, *, keep: bool) -> dict[str, Any]:
    """Gather the state of a model under its bare names, one parameter at a time; every rank calls it."""
    found: dict[str, Any] = {}
    shared: dict[int, torch.Tensor] = {}
    for name, value in weights_of(engine):
        if isinstance(value, SpreadWeight):
            if id(value) not in shared:
                complete = value()
                shared[id(value)] = complete.cpu() if keep else complete[:0]
            value = shared[id(value)]
        found[name] = value
    return found if keep else {}


@torch.no_grad()
def load_into(engine: DeepSpeedEngine, state: Mapping[str, Any]) -> None:
    """Load whole weights into a model, one parameter at a time; every rank calls it."""
    model = getattr(engine, "module", engine)
    for name, parameter in model.named_parameters():
        with importlib.import_module("deepspeed").zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(state[canonical_name(name)])
    for name, buffer in model.named_buffers():
        if canonical_name(name) in state:
            buffer.copy_(state[canonical_name(name)])


def weights_of(engine: DeepSpeedEngine) -> Iterator[tuple[str, Any]]:
    """Yield the names and weights of a model: sharded ones as a `SpreadWeight`, one for all names of a tied weight."""
    model = getattr(engine, "module", engine)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    spread: dict[int, SpreadWeight] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        parameter = parameters.get(name)
        if parameter is not None and hasattr(parameter, "ds_id"):
            lazy = SpreadWeight(tuple(parameter.ds_shape), parameter.dtype, partial(gathered, parameter))
            yield canonical_name(name), spread.setdefault(parameter.ds_id, lazy)
        else:
            yield canonical_name(name), value.detach() if isinstance(value, torch.Tensor) else value


def gathered(parameter: Any) -> torch.Tensor:
    """Return a sharded parameter whole; every rank calls it."""
    zero = importlib.import_module("deepspeed").zero
    with zero.GatheredParameters([parameter]):
        whole: torch.Tensor = parameter.data.detach().clone()
    return whole
