"""How far a run has come: the accumulation counter, the save iteration, and what others count."""

from __future__ import annotations

from accel_core.checkpoint import json_file, names, pickles, rng
from accel_core.checkpoint.format import Part, Run, Source
from accel_core.checkpoint.parts import FilePart
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.checkpoint.stateful import Stateful
from accel_core.errors import CheckpointDamagedError, CheckpointError

__all__ = ["part", "random_part", "random_restoration", "restoration"]


def part(run: Run) -> Part:
    """Return the file of counters; one rank of a disk writes it."""
    content = {
        "step": run.step,
        "iteration": run.project.iteration,
        "world_size": run.world.size,
        "counters": {name: counter.state_dict() for name, counter in _counters(run).items()},
    }
    return FilePart(names.PROGRESS_NAME, "json", content)


def random_part(run: Run) -> Part:
    """Return the file of this rank's random states; like Accelerate's, it contains the accumulation counter."""
    states = {"step": run.step} | rng.collect(run.world)
    return FilePart(names.random_states_name(run.world.rank), "object", states)


def restoration(run: Run, source: Source) -> Restoration:
    """Compare the counters of the checkpoint with the run, changing nothing."""
    component, rank = "progress", run.world.rank
    if source.manifest is None:
        return Restoration(component)
    try:
        source.check_listed(names.PROGRESS_NAME)
        content = json_file.read_json(source.folder, names.PROGRESS_NAME)
        counters = content["counters"]
        step = int(content["step"])
        if not isinstance(counters, dict):
            raise TypeError("counters are no table")
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    except (KeyError, TypeError, ValueError) as error:
        damage = CheckpointDamagedError(f"{names.PROGRESS_NAME} has another form; got {error!r}.")
        return Restoration(component, findings=[finding_of(damage, component, rank)])

    def apply() -> None:
        run.step = step
        for name, counter in _counters(run).items():
            if name in counters:
                counter.load_state_dict(counters[name])

    return Restoration(component, apply, files=frozenset({names.PROGRESS_NAME}))


def random_restoration(run: Run, source: Source) -> Restoration:
    """Compare this rank's random states with the process, changing nothing."""
    component, world = "random states", run.world
    known = world.rank < source.world_size
    name = names.random_states_name(world.rank if known else world.rank % source.world_size)
    try:
        source.check_listed(name)
        states = pickles.read_object(source.folder, name, **source.plain_kwargs)
        rng.check(states, world)
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, world.rank)])
    step = states.get("step", 0)
    if type(step) is not int:
        detail = f"{name} holds a step that is no number"
        return Restoration(component, findings=[Finding(component, "mismatch", detail, world.rank)])

    def apply() -> None:
        run.step = step
        (rng.restore if known else rng.derive)(states, world)

    return Restoration(component, apply, files=frozenset({name}))


def _counters(run: Run) -> dict[str, Stateful]:
    """Return what else the run counts: the steps of its trackers."""
    hub = getattr(run, "hub", None)
    return {"trackers": hub} if isinstance(hub, Stateful) else {}
