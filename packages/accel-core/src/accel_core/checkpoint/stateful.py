"""Everything with `state_dict` and `load_state_dict` besides models and optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from accel_core.checkpoint import names, payload
from accel_core.checkpoint.format import Part, Source
from accel_core.checkpoint.parts import FilePart
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.checkpoint.run import Run
from accel_core.errors import CheckpointError, ConfigurationError

__all__ = ["Stateful", "check_stateful", "extra_components", "parts", "restorations"]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken out and put back."""

    def state_dict(self) -> Any:
        """Return the state as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Any) -> Any:
        """Put back what `state_dict` returned."""


def check_stateful(objects: Any) -> None:
    """Make sure that objects can be registered for checkpointing.

    Raises:
        ConfigurationError: Some have no `state_dict` or no `load_state_dict`.
    """
    wrong = [
        f"\n\t- Item at index {index}, `{type(item).__name__}`"
        for index, item in enumerate(objects)
        if not isinstance(item, Stateful)
    ]
    if wrong:
        raise ConfigurationError(
            "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The following "
            f"inputs are invalid:{''.join(wrong)}\nGive them both methods, or leave them out."
        )


def parts(run: Run) -> list[Part]:
    """Return the files of schedulers, loaders, the scaler and registered objects.

    Raises:
        UnsafeCheckpointError: A state could not be read back without running code.
    """
    found: list[Part] = []

    def add(name: str, component: str, state: Any) -> None:
        payload.prove_readable(state, component)
        found.append(FilePart(name, "object", state))

    for index, scheduler in enumerate(run.schedulers):
        add(names.scheduler_name(index), f"scheduler {index}", scheduler.state_dict())
    for index, loader in enumerate(run.dataloaders):
        cursor = _cursor(loader)
        if cursor is not None:
            add(names.sampler_name(index), f"data position {index}", cursor.state_dict())
        if _keeps_state(loader):
            add(names.dataloader_name(index), f"data loader {index}", loader.state_dict())
    if run.scaler is not None:
        add(names.SCALER_NAME, "scaler", run.scaler.state_dict())
    for index, item in enumerate(run.custom_objects):
        add(names.custom_name(index), f"registered object {index} ({type(item).__name__})", item.state_dict())
    return found


def restorations(run: Run, source: Source) -> list[Restoration]:
    """Compare with the run, changing nothing, and return how each component is restored."""
    rank = run.world.rank
    found: list[Restoration] = []

    def add(name: str, component: str, target: Any, *, keys: bool = True) -> None:
        found.append(_restoration(source, name, component, target, rank, keys=keys))

    for index, scheduler in enumerate(run.schedulers):
        add(names.scheduler_name(index), f"scheduler {index}", scheduler)
    for index, loader in enumerate(run.dataloaders):
        position, state = names.sampler_name(index), names.dataloader_name(index)
        cursor = _cursor(loader)
        if cursor is not None and _present(source, position):
            add(position, f"data position {index}", cursor, keys=False)
        if _keeps_state(loader) and _present(source, state):
            add(state, f"data loader {index}", loader, keys=False)
    if run.scaler is not None:
        add(names.SCALER_NAME, "scaler", run.scaler, keys=False)
    for index, item in enumerate(run.custom_objects):
        add(names.custom_name(index), f"registered object {index}", item, keys=False)
    return found


def extra_components(run: Run, models: int, source: Source) -> list[Finding]:
    """Return the components that the checkpoint holds and the run does not have; they are not loaded."""
    counts = {
        "model": models,
        "pytorch_model": models,
        "optimizer": len(run.optimizers),
        "scheduler": len(run.schedulers),
        "sampler": len(run.dataloaders),
        "dl_state_dict": len(run.dataloaders),
        "custom_checkpoint": len(run.custom_objects),
    }
    found = []
    for entry in sorted(source.folder.iterdir()):
        parsed = re.fullmatch(r"([a-z_]+?)(?:_(\d+))?\.(?:safetensors|bin|pkl)", entry.name)
        if parsed and parsed[1] in counts and int(parsed[2] or 0) >= counts[parsed[1]]:
            found.append(Finding(entry.name, "extra", "the run has no such component", run.world.rank))
    if run.scaler is None and (source.folder / names.SCALER_NAME).exists():
        found.append(Finding(names.SCALER_NAME, "extra", "the run has no gradient scaler", run.world.rank))
    return found


def _restoration(source: Source, name: str, component: str, target: Any, rank: int, *, keys: bool) -> Restoration:
    try:
        state = payload.read_object(source.folder, name, **source.load_kwargs)
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    findings = []
    if keys:
        problem = _key_difference(target.state_dict(), state)
        findings += [Finding(component, "mismatch", problem, rank)] if problem else []
    unit = getattr(target, "unit", None)
    if unit is not None and isinstance(state, Mapping) and state.get("offset") and state.get("unit") != unit:
        detail = f"counts {state.get('unit')}, and the loader counts {unit}"
        findings.append(Finding(component, "mismatch", detail, rank))
    return Restoration(component, lambda: target.load_state_dict(state), findings, files=frozenset({name}))


def _key_difference(own: Any, state: Any) -> str | None:
    """Compare the public names of two states; torch adds and drops private ones between versions."""
    if not isinstance(own, Mapping):
        return None
    if not isinstance(state, Mapping):
        return f"the file holds a {type(state).__name__} instead of a dict"
    ours, theirs = ({key for key in each if not str(key).startswith("_")} - {"verbose"} for each in (own, state))
    if ours == theirs:
        return None
    return f"has {sorted(theirs - ours)} and lacks {sorted(ours - theirs)}: the state of another class"


def _cursor(loader: Any) -> Stateful | None:
    cursor = getattr(loader, "cursor", None)
    return cursor if isinstance(cursor, Stateful) else None


def _keeps_state(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False)) and isinstance(loader, Stateful)


def _present(source: Source, name: str) -> bool:
    """Tell whether a file is due: listed in the manifest, or, in a folder of Accelerate, there."""
    return (source.folder / name).exists() if source.manifest is None else name in source.manifest
