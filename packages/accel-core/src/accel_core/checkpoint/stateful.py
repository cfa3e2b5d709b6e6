"""Everything with `state_dict` and `load_state_dict` besides models and optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from accel_core.checkpoint import names, pickles
from accel_core.checkpoint.format import Part, Run, Source
from accel_core.checkpoint.parts import FilePart
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.errors import CheckpointError

__all__ = ["Stateful", "extra_components", "parts", "restorations", "scaler_restorations"]

_POSITION: dict[str, tuple[type, ...]] = {
    "epoch": (int,),
    "offset": (int,),
    "unit": (str,),
    "seed": (int, type(None)),
    "order": (dict,),
    "drawn_late": (bool,),
    "steps": (int,),
    "readers": (list,),
}
"""What the file of a position holds, and of which types."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken out and put back."""

    def state_dict(self) -> object:
        """Return the state as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore what `state_dict` returned.

        Args:
            state: The state.

        Returns:
            Anything; it is ignored.
        """


def parts(run: Run) -> list[Part]:
    """Return the files of schedules, loaders, the scaler and registered objects.

    Raises:
        UnsafeCheckpointError: A state could not be read back without running code.
    """
    found: list[Part] = []

    def add(name: str, component: str, state: object) -> None:
        pickles.prove_readable(state, component)
        found.append(FilePart(name, "object", state))

    for index, scheduler in enumerate(run.schedulers):
        add(names.scheduler_name(index), f"scheduler {index}", scheduler.state_dict())
    for index, loader in enumerate(run.dataloaders):
        cursor = _cursor(loader)
        if cursor is not None:
            add(names.sampler_name(index), f"data position {index}", cursor.state_dict())
        state = _state_of(loader) if _keeps_state(loader) else None
        if state is not None:
            add(names.dataloader_name(index), f"data loader {index}", state)
    if run.scaler is not None:
        add(names.SCALER_NAME, "scaler", run.scaler.state_dict())
    for index, item in enumerate(run.custom_objects):
        add(names.custom_name(index), f"registered object {index} ({type(item).__name__})", item.state_dict())
    return found


def restorations(run: Run, source: Source) -> list[Restoration]:
    """Compare the checkpoint with the run, changing nothing."""
    rank, restores = run.world.rank, run.data.restores_position
    found: list[Restoration] = []

    def add(name: str, component: str, target: Stateful, differ: Callable[[Any, Any], str | None] = _accept) -> None:
        found.append(_restoration(source, name, component, target, rank, differ))

    for index, scheduler in enumerate(run.schedulers):
        add(names.scheduler_name(index), f"scheduler {index}", scheduler, _key_difference)
    for index, loader in enumerate(run.dataloaders):
        position, state = names.sampler_name(index), names.dataloader_name(index)
        cursor = _cursor(loader)
        if cursor is not None and (restores or _keeps_state(loader)) and _present(source, position):
            add(position, f"data position {index}", cursor, _position_difference)
        if _keeps_state(loader) and _present(source, state):
            add(state, f"data loader {index}", loader)
    for index, item in enumerate(run.custom_objects):
        add(names.custom_name(index), f"registered object {index}", item)
    return found


def scaler_restorations(run: Run, source: Source) -> list[Restoration]:
    """Compare the checkpoint with the gradient scaler, changing nothing."""
    if run.scaler is None:
        return []
    return [_restoration(source, names.SCALER_NAME, "scaler", run.scaler, run.world.rank, _scaler_difference)]


def extra_components(run: Run, models: int, source: Source) -> list[Finding]:
    """Return the components of the checkpoint that the run does not have; they are not loaded."""
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


def _restoration(
    source: Source, name: str, component: str, target: Stateful, rank: int, differ: Callable[[Any, Any], str | None]
) -> Restoration:
    try:
        source.check_listed(name)
        state = pickles.read_object(source.folder, name, **source.plain_kwargs)
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    problem = None if differ is _accept else differ(target.state_dict(), state)
    findings = [Finding(component, "mismatch", problem, rank)] if problem else []
    unit = getattr(target, "unit", None)
    if unit is not None and isinstance(state, Mapping) and state.get("offset") and state.get("unit") != unit:
        detail = f"counts {state.get('unit')}, and the loader counts {unit}"
        findings.append(Finding(component, "mismatch", detail, rank))
    return Restoration(component, lambda: target.load_state_dict(state), findings, files=frozenset({name}))


def _accept(own: object, state: object) -> None:
    """Find nothing: only the object itself knows the form of its state."""


def _position_difference(own: Mapping[str, Any], state: object) -> str | None:
    """Compare the form of a loader's position with that of this version."""
    if not isinstance(state, Mapping):
        return f"the file holds a {type(state).__name__} instead of a dict"
    version, known = state.get("version"), own.get("version")
    if type(version) is not int or version != known:
        return f"has the version {version!r:.40} and this accel reads {known}"
    for key, types in _POSITION.items():
        value = state.get(key, ...)
        if type(value) not in types:
            return f"holds {'no' if value is ... else 'a ' + type(value).__name__ + ' for its'} {key}"
    negative = [key for key in ("epoch", "offset", "steps") if state[key] < 0]
    if negative or not all(isinstance(one, Tensor) for one in state["order"].values()):
        return f"holds {negative[0] + ' that is negative' if negative else 'an order that is no states of generators'}"
    if len(state["readers"]) != len(own["readers"]):
        return f"holds {len(state['readers'])} facts of its readers and this accel reads {len(own['readers'])}"
    return None


def _scaler_difference(own: object, state: object) -> str | None:
    """Compare the state of a gradient scaler; one that is switched off has none and takes any."""
    return _key_difference(own, state) if own else None


def _key_difference(own: object, state: object) -> str | None:
    """Compare the public names of two states; torch adds and drops private ones between versions."""
    if not isinstance(own, Mapping):
        return None
    if not isinstance(state, Mapping):
        return f"the file holds a {type(state).__name__} instead of a dict"
    ours, theirs = ({key for key in each if not str(key).startswith("_")} - {"verbose"} for each in (own, state))
    if ours == theirs:
        return None
    return f"has {sorted(theirs - ours)} and lacks {sorted(ours - theirs)}: the state of another class"


def _cursor(loader: object) -> Stateful | None:
    cursor = getattr(loader, "cursor", None)
    return cursor if isinstance(cursor, Stateful) else None


def _keeps_state(loader: object) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False)) and isinstance(loader, Stateful)


def _state_of(loader: Any) -> object:
    """Return the state of a stateful loader; `None` where it has none yet.

    Asking one of torchdata's for its state before it was iterated makes its iterator there and then: a seed is drawn
    from torch's generator now and not later, workers are started, and a run that saves differs from one that does not.
    """
    if getattr(loader, "_iterator", None) is None and hasattr(loader, "next_iter_state"):
        return loader.next_iter_state
    return loader.state_dict()


def _present(source: Source, name: str) -> bool:
    """Return whether a file is due: listed in the manifest, or, in a folder of Accelerate, there."""
    return (source.folder / name).exists() if source.manifest is None else name in source.manifest
