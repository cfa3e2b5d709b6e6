"""Everything in a checkpoint besides models and optimizers: objects with a state, counters and random generators."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from accel_core.checkpoint import names, pickles, rng
from accel_core.checkpoint.format import FilePart, Part, Run, Source
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.errors import CheckpointError
from accel_core.modules.reduction_order import ReductionOrders
from accel_core.state.run import first_tensor_parallel_rank


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
    """Return the files of schedules, loaders, the scaler and registered objects."""
    found: list[Part] = []

    def add(name: str, component: str, state: object) -> None:
        pickles.prove_readable(state, component)  # refused now, and not when it is to be loaded
        found.append(FilePart(name, "object", state))

    for index, scheduler in enumerate(run.schedulers):
        add(names.numbered(names.SCHEDULER_NAME, index), f"scheduler {index}", scheduler.state_dict())
    for index, loader in enumerate(run.dataloaders):
        cursor = _cursor(loader)
        if cursor is not None:
            add(names.numbered(names.SAMPLER_NAME, index), f"data position {index}", cursor.state_dict())
        state = _state_of(loader) if _keeps_state(loader) else None
        if state is not None:
            add(names.numbered(names.DATALOADER_NAME, index), f"data loader {index}", state)
    if run.scaler is not None:
        add(names.SCALER_NAME, "scaler", run.scaler.state_dict())
    for index, item in enumerate(run.custom_objects):
        add(names.custom_name(index), f"registered object {index} ({type(item).__name__})", item.state_dict())
    return found


def counters_part(run: Run) -> Part:
    """Return the file of the counters of a run; one rank of a disk writes it."""
    return FilePart(names.PROGRESS_NAME, "json", _Counters(run).state_dict())


def random_part(run: Run) -> Part:
    """Return the file of this rank's random states; like Accelerate's, it contains the accumulation counter."""
    return FilePart(names.random_states_name(run.world.rank), "object", _Generators(run).state_dict())


def restorations(run: Run, source: Source, optimizers: Sequence[Restoration]) -> list[Restoration]:
    """Compare the checkpoint with all of the run but its models, changing nothing; in the order of restoring."""
    restores = run.data.restores_position
    owner = first_tensor_parallel_rank(run.world.rank)
    if not source.has(names.random_states_name(owner % source.world_size)):
        owner = run.world.rank  # a machine may have the files of its own ranks alone
    states = names.random_states_name(owner % source.world_size)
    known = source.has(states) and owner < source.world_size
    generators = _Generators(run, owner, known=known)
    found: list[Restoration] = []

    def add(
        name: str, component: str, target: Stateful, differ: Callable[[Any, Any], str | None] | None = None
    ) -> None:
        try:
            state = source.read(name, **source.plain_kwargs)
            # Without `differ`, only the object itself knows the form of its state.
            problem = differ(target.state_dict(), state) if differ else None
        except (CheckpointError, OSError) as error:
            found.append(Restoration(component, findings=[finding_of(error, component, run.world.rank)]))
            return
        findings = [Finding(component, "mismatch", problem, run.world.rank)] if problem else []
        load = partial(target.load_state_dict, state)
        found.append(Restoration(component, load, findings, files=frozenset({name})))

    # The scaler before the optimizers: one that steps while it is loaded does so at the scale of the checkpoint.
    if run.scaler is not None:
        # One that is switched off has no state and takes any.
        add(names.SCALER_NAME, "scaler", run.scaler, _key_difference if run.scaler.state_dict() else None)
    found += optimizers
    for index, scheduler in enumerate(run.schedulers):
        add(names.numbered(names.SCHEDULER_NAME, index), f"scheduler {index}", scheduler, _key_difference)
    for index, loader in enumerate(run.dataloaders):
        position, state = names.numbered(names.SAMPLER_NAME, index), names.numbered(names.DATALOADER_NAME, index)
        cursor = _cursor(loader)
        if cursor is not None and source.has(position):
            if restores or _keeps_state(loader):
                add(position, f"data position {index}", cursor, _position_difference)
            elif source.manifest is not None and cursor.state_dict().get("seed") is not None:
                add(position, f"data position {index}", _Epoch(cursor), _position_difference)
        if _keeps_state(loader) and source.has(state):
            add(state, f"data loader {index}", loader)
    for index, item in enumerate(run.custom_objects):
        add(names.custom_name(index), f"registered object {index}", item)
    if source.manifest is not None:
        add(names.PROGRESS_NAME, "progress", _Counters(run))
    if source.manifest is not None and source.manifest.absent and not source.has(states):
        states = names.random_states_name(0)
    add(states, "random states", generators, generators.difference)
    return found


def extra_components(run: Run, source: Source) -> list[Finding]:
    """Return the components of the checkpoint that the run does not have; they are not loaded."""
    counts = {
        "model": len(run.models),
        "pytorch_model": len(run.models),
        "optimizer": len(run.optimizers),
        "scheduler": len(run.schedulers),
        "sampler": len(run.dataloaders),
        "dl_state_dict": len(run.dataloaders),
        "custom_checkpoint": len(run.custom_objects),
    }
    found = []
    for name in sorted(os.listdir(source.folder)):
        parsed = re.fullmatch(r"([a-z_]+?)(?:_(\d+))?\.(?:safetensors|bin|pkl)", name)
        if parsed and parsed[1] in counts and int(parsed[2] or 0) >= counts[parsed[1]]:
            found.append(Finding(name, "extra", "the run has no such component", run.world.rank))
    if run.scaler is None and (source.folder / names.SCALER_NAME).exists():
        found.append(Finding(names.SCALER_NAME, "extra", "the run has no gradient scaler", run.world.rank))
    return found


class _Counters:
    """The counters of a run, and what else belongs to no file: the steps of its trackers, the order of its sums."""

    def __init__(self, run: Run) -> None:
        self._run = run
        hub = getattr(run, "hub", None)
        self._others: dict[str, Stateful] = {"trackers": hub} if isinstance(hub, Stateful) else {}
        self._others["sums"] = ReductionOrders(run.models)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._run.step,
            "iteration": self._run.project.iteration,
            "world_size": self._run.world.size,
            "counters": {name: counter.state_dict() for name, counter in self._others.items()},
        }

    def load_state_dict(self, state: Any) -> None:
        self._run.step = state["step"]
        for name in self._others.keys() & state["counters"].keys():
            self._others[name].load_state_dict(state["counters"][name])


class _Generators:
    """The random generators of a process, and the accumulation counter, which Accelerate keeps with them.

    Those of a rank that did not save are seeded from the states of one that did. Ranks that draw the same numbers take
    those of one of them, the owner.
    """

    def __init__(self, run: Run, owner: int = 0, known: bool = True) -> None:
        self._run, self._owner, self._known = run, owner, known

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._run.step} | rng.collect(self._run.world)

    def load_state_dict(self, states: Any) -> None:
        self._run.step = states.get("step", 0)
        if self._known:
            rng.restore(states, self._run.world, self._owner)
        else:
            rng.derive(states, self._owner)

    def difference(self, own: object, states: Any) -> str | None:
        rng.check(states, self._run.world)
        return None if type(states.get("step", 0)) is int else "holds a step that is not a number"


class _Epoch:
    """The epoch of a position alone, where a seed decides its order: scripts for Accelerate skip batches themselves."""

    def __init__(self, cursor: Any) -> None:
        self._cursor, self.state_dict = cursor, cursor.state_dict

    def load_state_dict(self, state: Any) -> None:
        self._cursor.load_state_dict(state | {"offset": 0, "steps": 0, "order": {}, "drawn_late": False})


def _position_difference(own: Mapping[str, Any], state: object) -> str | None:
    """Compare what a loader's position counts with what that of this version does."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or version != own["version"]:
        return f"has the version {version!r:.40} and this accel reads {own['version']}"
    if missing := own.keys() - state.keys():
        return f"lacks {sorted(missing)}"
    if state["offset"] and state["unit"] != own["unit"]:
        return f"counts {state['unit']}, and the loader counts {own['unit']}"
    return None


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


def _cursor(loader: object) -> Any:
    cursor = getattr(loader, "cursor", None)
    return cursor if isinstance(cursor, Stateful) else None


def _keeps_state(loader: object) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False)) and isinstance(loader, Stateful)


def _state_of(loader: Any) -> object:
    """Return the state of a stateful loader; `None` where it has none yet."""
    # Asking one of torchdata's before it was iterated makes its iterator there and then: a seed is drawn from torch's
    # generator now and not later, workers start, and a run that saves differs from one that does not.
    if getattr(loader, "_iterator", None) is None and hasattr(loader, "next_iter_state"):
        return loader.next_iter_state
    return loader.state_dict()
