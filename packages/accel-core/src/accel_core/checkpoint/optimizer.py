"""Comparing a stored optimizer state with an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from accel_core.checkpoint import names
from accel_core.checkpoint.format import Source
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.errors import CheckpointError
from accel_core.mesh.tensor import is_spread, placed_like

_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta", "ax"}
)
"""Entries that have the shape of their parameter in every optimizer of torch."""

# What schedules add to a group, and names of parameters, which not every torch keeps.
_NOT_COMPARED = frozenset({"params", "param_names", "initial_lr", "swa_lr", "base_momentum", "max_momentum"})


def restoration(
    optimizer: Any, index: int, source: Source, rank: int, names_of: Sequence[Sequence[str]] | None = None
) -> Restoration:
    """Compare the file of optimizer `index` with an optimizer, changing nothing."""
    component, name = f"optimizer {index}", names.numbered(names.OPTIMIZER_NAME, index)
    try:
        state = source.read(name, **source.load_kwargs)
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    problems: list[str] = []
    if names_of is not None and _has_names(state):
        groups, problems = ordered(state["param_groups"], names_of)
        state = {**state, "param_groups": groups}
    problems = problems or differences(state, optimizer)
    findings = [Finding(component, "mismatch", detail, rank) for detail in problems]
    apply = partial(_load, optimizer, state)
    return Restoration(component, apply, findings, files=frozenset({name}))


def ordered(
    groups: Sequence[Mapping[str, Any]], names_of: Sequence[Sequence[str]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return groups of parameters that are named in the order of an optimizer's own, and what does not fit."""
    if len(groups) != len(names_of):
        return [dict(group) for group in groups], [f"{len(groups)} parameter groups instead of {len(names_of)}"]
    found: list[str] = []
    for number, (group, own) in enumerate(zip(groups, names_of, strict=True)):
        stored = group["params"]
        lacking = [name for name in own if name not in set(stored)]
        unknown = [name for name in stored if name not in set(own)]
        found += [f"group {number} lacks {', '.join(lacking)}"] if lacking else []
        found += [f"group {number} has {', '.join(unknown)}, which the optimizer does not train"] if unknown else []
    return [{**group, "params": list(own)} for group, own in zip(groups, names_of, strict=True)], found


def _has_names(state: Any) -> bool:
    held = [name for group in state["param_groups"] for name in group["params"]] if _is_state(state) else []
    return bool(held) and all(isinstance(name, str) for name in held)


def _load(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a state that fits; of what belongs to a parameter that is spread over ranks, this rank's part."""
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    owners = {key: own for group, mine in pairs for key, own in zip(group["params"], mine["params"], strict=True)}
    if any(is_spread(own) for own in owners.values()):
        placed = {
            key: {name: placed_like(value, owners[key]) for name, value in entries.items()}
            if key in owners and isinstance(entries, Mapping)
            else entries
            for key, entries in state["state"].items()
        }
        state = {**state, "state": placed}
    optimizer.load_state_dict(state)


def differences(state: Any, optimizer: Any) -> list[str]:
    """Return the differences between a stored state and an optimizer, one line each."""
    if not _is_state(state):
        return ["the file holds no state of an optimizer"]
    groups, own_groups = state["param_groups"], optimizer.param_groups
    if len(groups) != len(own_groups):
        return [f"{len(groups)} parameter groups instead of {len(own_groups)}"]
    found: list[str] = []
    parameters: dict[Any, Tensor] = {}
    for number, (group, own) in enumerate(zip(groups, own_groups, strict=True)):
        ours, theirs = own.keys() - _NOT_COMPARED, group.keys() - _NOT_COMPARED
        # In one direction only, it may be another version of torch: versions add settings.
        if ours - theirs and theirs - ours:
            found.append(
                f"group {number} has {sorted(theirs - ours)} and lacks {sorted(ours - theirs)}: another optimizer"
            )
        if len(group["params"]) != len(own["params"]):
            found.append(f"group {number} has {len(group['params'])} parameters instead of {len(own['params'])}")
        else:
            parameters.update(zip(group["params"], own["params"], strict=True))
    if found:
        return found
    current = getattr(optimizer, "state", {})
    for key, entries in state["state"].items():
        parameter = parameters.get(key)
        # Of no parameter: torch keeps such an entry as it is.
        if parameter is None or not isinstance(entries, Mapping):
            continue
        own_entries = current.get(parameter, {})
        for name, value in entries.items():
            problem = _shape_difference(value, parameter if name in _LIKE_PARAMETER else own_entries.get(name))
            if problem:
                found.append(f"{name} of parameter {key} {problem}")
    return found


def _shape_difference(value: object, expected: object) -> str | None:
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor) or not expected.numel():
        return None
    if tuple(value.shape) == tuple(expected.shape):
        return None
    return f"has shape {tuple(value.shape)} instead of {tuple(expected.shape)}"


def _is_state(state: object) -> bool:
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("state"), Mapping)
        and isinstance(state.get("param_groups"), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in state["param_groups"])
    )
