"""Checkpoints of a part of a run: its models alone, or only the adapters of models of PEFT."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from accel_core.checkpoint import names
from accel_core.checkpoint.format import FilePart, Part, Run, Source
from accel_core.checkpoint.report import Finding, Restoration
from accel_core.errors import CheckpointDamagedError, ConfigurationError
from accel_core.modules.unwrap import canonical_name, extract_model_from_parallel

MODEL, ADAPTERS = "model", "adapters"
_MISSING = " is not in the checkpoint"
_R = TypeVar("_R", bound=Run)


def chosen(parts: list[str] | None, run: Run) -> str | None:
    """Return which part of a run is saved; `None` for all of it.

    Raises:
        ConfigurationError: There is no such part, or it cannot be saved alone in this run.
    """
    if parts is None:
        return None
    if parts not in ([MODEL], [ADAPTERS]):
        raise ConfigurationError(
            f"save_state saves a part of a run as parts=('model',) or parts=('adapters',); got {parts!r}. Leave parts "
            "out to save all."
        )
    form = type(run.strategy.format)
    if not getattr(form, "has_models_apart", False):
        raise ConfigurationError(
            f"This engine writes models together with their optimizers; got parts={tuple(parts)}. Leave parts out, or "
            "call save_model for weights alone."
        )
    if parts == [ADAPTERS]:
        # A form that is made of another one writes models in its own way.
        if not getattr(form, "has_adapters_apart", False) or "has_adapters_apart" not in vars(form):
            raise ConfigurationError(
                f"Not every strategy can save adapters alone; got {type(run.strategy).__name__}. Save "
                "parts=('model',), or the adapters with PEFT's save_pretrained."
            )
        for model in run.models:
            _adapters_of(model)
    return parts[0]


def without_the_rest(run: _R) -> _R:
    """Return a run that is nothing but its models, and numbers no checkpoints."""
    project = copy.copy(run.project)
    project.automatic_checkpoint_naming = False
    empty: dict[str, Any] = {"optimizers": [], "schedulers": [], "dataloaders": [], "custom_objects": []}
    return replace(run, project=project, **empty)  # type: ignore[type-var]


def kept_of(part: str | None, run: Run) -> list[set[str]] | None:
    """Return the names of the weights that are saved of each model; `None` where all are."""
    return [_adapters_of(model) for model in run.models] if part == ADAPTERS else None


def restricted(kept: Sequence[set[str]] | None, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what of the models' states is saved; a rank may have none."""
    if kept is None or not states:
        return list(states)
    return [{n: v for n, v in each.items() if n in own} for each, own in zip(states, kept, strict=True)]


def part(name: str) -> Part:
    """Return the file that says which part of a run a checkpoint is."""
    return FilePart(names.PARTS_NAME, "json", {"parts": [name]})


def selected(source: Source) -> str | None:
    """Return which part of a run a checkpoint is; `None` for all of it."""
    if source.manifest is None or names.PARTS_NAME not in source.manifest:
        return None
    found = source.read(names.PARTS_NAME)
    if not isinstance(found, Mapping) or found.get("parts") not in ([MODEL], [ADAPTERS]):
        raise CheckpointDamagedError(
            f"The file {names.PARTS_NAME} of {str(source.folder)!r} does not say which part of a run is saved there; "
            f"got {found!r}. Load another checkpoint."
        )
    return str(found["parts"][0])


def fitting(plan: Restoration, model: object) -> Restoration:
    """Return how adapters are restored: what a model has besides them is not missed."""
    own = _adapters_of(model) if is_of_peft(model) else None

    def is_missed(found: Finding) -> bool:
        return own is None or found.kind != "missing" or found.detail.removesuffix(_MISSING) in own

    plan.findings = [found for found in plan.findings if is_missed(found)]
    return plan


def is_of_peft(model: object) -> bool:
    """Return whether PEFT made a model: it has adapters under names that are in its `peft_config`."""
    return isinstance(getattr(_bare(model), "peft_config", None), Mapping)


def _bare(model: Any) -> nn.Module:
    bare: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return bare


def _adapters_of(model: object) -> set[str]:
    """Return the names of the weights of a model's adapters, and of all else that is trained with them."""
    if not is_of_peft(model):
        raise ConfigurationError(
            f"Adapters are those of models that PEFT made; got a {type(_bare(model)).__name__}. Save parts=('model',)."
        )
    bare: Any = _bare(model)
    adapters = set(bare.peft_config)
    parameters = [(canonical_name(name), each) for name, each in bare.named_parameters()]
    return {name for name, each in parameters if each.requires_grad or not adapters.isdisjoint(name.split("."))}
