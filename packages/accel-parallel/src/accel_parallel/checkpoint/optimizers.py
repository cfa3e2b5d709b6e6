"""Stored states of optimizers in shards, by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel_core._records import record
from accel_core.checkpoint import names, optimizer
from accel_core.checkpoint.format import Source
from accel_core.checkpoint.report import Finding, Restoration, finding_of
from accel_core.checkpoint.tensor_file import storage_key
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from accel_core.mesh.tensor import empty_like, is_spread, local_part, spread_alike
from accel_core.modules.unwrap import canonical_name, extract_model_from_parallel
from accel_parallel.checkpoint.models import damages, is_sharded, shards_of
from accel_parallel.checkpoint.reader import ShardFolder

__all__ = ["NamedOptimizer", "named_optimizer", "restoration", "state_by_names"]


@record(frozen=True)
class NamedOptimizer:
    """An optimizer, seen by the names of its parameters."""

    param_groups: list[dict[str, Any]]  # its groups; `params` holds tensors of the shapes of the parameters
    names: list[list[str]]  # names of the parameters, group by group
    like: dict[str, Tensor]  # by name, a tensor that is spread over ranks as the entries of its state are to be
    load_state_dict: Callable[[dict[str, Any]], None]  # loads a state dict whose keys are those names, in this order
    state: Mapping[Any, Any] = field(default_factory=dict)  # what is there, by parameter, if it is to be compared
    held: frozenset[str] | None = None  # whose state this rank keeps, if it is not all


def named_optimizer(own: Any, models: Sequence[Any]) -> NamedOptimizer:
    """Return an optimizer by the names that its parameters have in the models.

    Where it trains several models, the names in all but the first of them begin with `model_<number>.`.
    """
    given = names_of(own, models)
    like = {
        name: parameter
        for group, known in zip(own.param_groups, given, strict=True)
        for parameter, name in zip(group["params"], known, strict=True)
    }
    return NamedOptimizer(list(own.param_groups), given, like, own.load_state_dict, getattr(own, "state", {}))


def names_of(own: Any, models: Sequence[Any]) -> list[list[str]]:
    """Return the names of an optimizer's parameters by group; one of no model has its place as name."""
    held = {id(parameter) for group in own.param_groups for parameter in group["params"]}
    known: dict[int, str] = {}
    trained = 0
    for each in models:
        inner: nn.Module = extract_model_from_parallel(each, keep_torch_compile=False)
        mine = {id(parameter): canonical_name(name) for name, parameter in inner.named_parameters()}
        if mine.keys() & held:
            prefix = f"model_{trained}." if trained else ""
            known = {key: prefix + name for key, name in mine.items()} | known
            trained += 1
    return [
        [
            known.get(id(parameter), f"parameter {place} of group {number}")
            for place, parameter in enumerate(g["params"])
        ]
        for number, g in enumerate(own.param_groups)
    ]


def state_by_names(own: Any, models: Sequence[Any]) -> dict[str, Any]:
    """Return the state of an optimizer with parameter names as keys."""
    state = own.state_dict()
    given = names_of(own, models)
    known = {
        key: name
        for group, named in zip(state["param_groups"], given, strict=True)
        for key, name in zip(group["params"], named, strict=True)
    }
    return {
        "state": {known[key]: entries for key, entries in state["state"].items()},
        "param_groups": [{**group, "params": named} for group, named in zip(state["param_groups"], given, strict=True)],
    }


def restoration(own: NamedOptimizer, index: int, source: Source, rank: int) -> Restoration:
    """Compare optimizer `index` of a checkpoint, in shards or whole, with an optimizer, changing nothing."""
    component, folder = f"optimizer {index}", names.sharded(names.OPTIMIZER_NAME, index)
    if not is_sharded(source, folder):
        return optimizer.restoration(own, index, source, rank, own.names)
    try:
        shards = shards_of(source, folder)
        stored = _Stored.of(shards)
        groups = [stored.group(number) for number in range(len(stored.of_groups))]
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    found = Restoration(component, files=frozenset(shards.files()))
    found.holds = {shards.file(file): held for file, held in shards.contents().items()}
    found.findings = damages(shards, source, component, rank)
    groups, problems = optimizer.ordered(groups, own.names)
    described = {"state": stored.described(), "param_groups": groups}
    problems = problems or optimizer.differences(described, own)
    found.findings += [Finding(component, "mismatch", problem, rank) for problem in problems]
    found.apply = partial(_apply, own, stored, groups)
    return found


def _apply(own: NamedOptimizer, stored: _Stored, groups: list[dict[str, Any]]) -> None:
    held = [name for group in groups for name in group["params"] if own.held is None or name in own.held]
    memory = _Memory(own)
    state = {name: stored.entries(name, own.like[name], memory) for name in held if name in stored.of_parameters}
    own.load_state_dict({"state": state, "param_groups": groups})


class _Memory:
    """The memory of an optimizer's state, which what is read takes again: fresh memory costs more than reading."""

    def __init__(self, own: NamedOptimizer) -> None:
        self._state = own.state
        self._taken = set[tuple[Any, ...]]()

    def of(self, path: _Path, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return memory for an entry of the state of a parameter, spread as the parameter is."""
        held = self._state.get(like, {}).get(path[0]) if len(path) == 1 else None
        if isinstance(held, Tensor) and held.dtype == dtype and _is_laid_out_as(held, like):
            key = storage_key(held)
            if key not in self._taken:  # entries that share memory would get the values of the last one
                self._taken.add(key)
                return held
        return empty_like(like, dtype)


def _is_laid_out_as(tensor: Tensor, like: Tensor) -> bool:
    """Return whether two tensors have the same shape, device and strides, and are spread over ranks alike."""
    if type(local_part(tensor)) is not Tensor or tensor.device != like.device:
        return False
    return (tensor.shape, tensor.stride()) == (like.shape, like.stride()) and spread_alike(tensor, like)


_Path = tuple[str | int, ...]


@record(frozen=True)
class _Stored:
    """The state of an optimizer in a folder of shards."""

    shards: ShardFolder
    # for each parameter, the names under which the entries of its state are stored, by their paths
    of_parameters: dict[str, dict[_Path, str]]
    of_groups: dict[int, dict[_Path, str]]

    @classmethod
    def of(cls, shards: ShardFolder) -> _Stored:
        """Look for the state in a folder."""
        parameters: dict[str, dict[_Path, str]] = {}
        groups: dict[int, dict[_Path, str]] = {}
        for name in [*shards.tensors, *sorted(shards.metadata.objects)]:
            match shards.metadata.path_of(name)[1:]:
                case ("state", str(parameter), *path) if path:
                    parameters.setdefault(parameter, {})[tuple(path)] = name
                case ("param_groups", int(number), *path) if path:
                    groups.setdefault(number, {})[tuple(path)] = name
                case ("state", *_):
                    continue  # an optimizer, or a parameter, without a state is an empty dict
                case (str(own),) if own.startswith(("state.", "param_groups.")):
                    raise CheckpointMismatchError(
                        f"The state in {str(shards.path)!r} is flattened, as transformers' save_optimizer_distributed "
                        f"writes it; got {name}. Load it with load_optimizer_distributed, or save with "
                        "accelerator.save_state."
                    )
                case _:
                    raise CheckpointDamagedError(
                        f"The shards {str(shards.path)!r} hold no state of an optimizer; got {name}. Load another "
                        "checkpoint."
                    )
        if sorted(groups) != list(range(len(groups))) or any(("params",) not in group for group in groups.values()):
            raise CheckpointDamagedError(
                f"The shards {str(shards.path)!r} hold no groups of parameters; got the groups {sorted(groups)}. Load "
                "another checkpoint."
            )
        return cls(shards, parameters, groups)

    def group(self, number: int) -> dict[str, Any]:
        """Return one group, with the names of its parameters."""
        return self._built({path: self._value(name) for path, name in self.of_groups[number].items()})

    def described(self) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter with tensors that have shapes and no values."""
        tensors = self.shards.tensors
        return {
            parameter: self._built(
                {
                    path: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta")
                    if name in tensors
                    else self._value(name)
                    for path, name in entries.items()
                }
            )
            for parameter, entries in self.of_parameters.items()
        }

    def entries(self, parameter: str, like: Tensor, memory: _Memory) -> dict[str, Any]:
        """Return the state of one parameter; of an entry of its shape, this rank's part if the parameter is spread."""
        stored = self.of_parameters[parameter]
        return self._built({path: self._value_like(name, path, like, memory) for path, name in stored.items()})

    @staticmethod
    def _built(values: Mapping[_Path, Any]) -> dict[str, Any]:
        built: dict[str, Any] = _nested(values)
        return built

    def _value(self, name: str) -> Any:
        return self.shards.read(name) if name in self.shards.tensors else self.shards.read_object(name)

    def _value_like(self, name: str, path: _Path, like: Tensor, memory: _Memory) -> Any:
        stored = self.shards.tensors.get(name)
        if stored is None or not is_spread(like) or not stored.shape or stored.shape != like.shape:
            return self._value(name)
        made = memory.of(path, like, stored.dtype)
        self.shards.read_into(name, made)
        return made


def _nested(values: Mapping[_Path, Any]) -> Any:
    """Return nested dicts and lists from values by their paths.

    >>> _nested({("lr",): 0.1, ("betas", 0): 0.9, ("betas", 1): 0.95})
    {'lr': 0.1, 'betas': [0.9, 0.95]}
    """
    nested: dict[Any, Any] = {}
    deeper: dict[Any, dict[_Path, Any]] = {}
    for (first, *rest), value in values.items():
        # In the order of the paths: groups keep the order of their entries.
        nested[first] = value
        if rest:
            deeper.setdefault(first, {})[tuple(rest)] = value
    nested.update({key: _nested(inner) for key, inner in deeper.items()})
    if nested and all(isinstance(key, int) for key in nested):
        return [nested[key] for key in sorted(nested)]
    return nested
