"""Stored states of optimizers in shards, by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from torch import Tensor, nn

from accel_core._records import record
from accel_core.checkpoint import names, optimizer
from accel_core.checkpoint.format import Source
from accel_core.checkpoint.report import Finding, Restoration, finding_of, listed
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from accel_core.mesh.tensor import empty_like, is_spread, local_part, spread_alike
from accel_core.modules.unwrap import canonical_name, extract_model_from_parallel
from accel_parallel.checkpoint.models import damages, is_sharded, shards_of
from accel_parallel.checkpoint.reader import ShardFolder


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
        groups = _mapped(shards.read, stored.groups)
        # Tensors by shape and dtype, anything else as it is.
        described = _mapped(lambda name: shards.like(name), stored.parameters)
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    found = Restoration(component, files=frozenset(shards.files()))
    found.holds = {shards.file(file): held for file, held in shards.contents().items()}
    found.findings = damages(shards, source, component, rank)
    groups, problems = optimizer.ordered(groups, own.names)
    problems = problems or optimizer.differences({"state": described, "param_groups": groups}, own)
    found.findings += [Finding(component, "mismatch", problem, rank) for problem in problems]
    found.apply = partial(_apply, own, stored, groups)
    return found


def _apply(own: NamedOptimizer, stored: _Stored, groups: list[dict[str, Any]]) -> None:
    held = [name for group in groups for name in group["params"] if own.held is None or name in own.held]
    state = {name: stored.entries(name, own) for name in held if name in stored.parameters}
    own.load_state_dict({"state": state, "param_groups": groups})


_Path = tuple[str | int, ...]


@record(frozen=True)
class _Stored:
    """The state of an optimizer in a folder of shards, with the names of values in place of them."""

    shards: ShardFolder
    parameters: dict[str, Any]  # the entries of each parameter's state
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, shards: ShardFolder) -> _Stored:
        """Look for the state in a folder."""
        paths = {path[1:] or ("",): name for name, path in shards.paths().items()}
        flat = [name for (first, *_), name in paths.items() if str(first).startswith(("state.", "param_groups."))]
        if flat:
            raise CheckpointMismatchError(
                f"The state in {str(shards.path)!r} is flattened, as transformers' save_optimizer_distributed writes "
                f"it; got {flat[0]}. Load it with load_optimizer_distributed, or save with accelerator.save_state."
            )
        match _nested(paths):
            case {"param_groups": [*groups], **rest} if not rest.keys() - {"state"}:
                if all(isinstance(group, dict) and "params" in group for group in groups):
                    return cls(shards, _dicts(rest.get("state")), groups)
        raise CheckpointDamagedError(
            f"The shards {str(shards.path)!r} hold no state of an optimizer; got {listed([*paths.values()])}. Load "
            "another checkpoint."
        )

    def entries(self, parameter: str, own: NamedOptimizer) -> dict[str, Any]:
        """Return the state of one parameter; of an entry of its shape, this rank's part if the parameter is spread."""
        like = own.like[parameter]
        held = own.state.get(like, {})
        return {
            entry: _mapped(partial(self._value_like, like, held.get(entry)), stored)
            for entry, stored in self.parameters[parameter].items()
        }

    def _value_like(self, like: Tensor, held: object, name: str) -> object:
        stored = self.shards.tensors.get(name)
        if stored is None or not is_spread(like) or not stored.dim() or stored.shape != like.shape:
            return self.shards.read(name)
        # Memory that is there is taken again: on a device there may be none for a second state.
        made = held if isinstance(held, Tensor) and held.dtype == stored.dtype and _is_laid_out_as(held, like) else None
        made = empty_like(like, stored.dtype) if made is None else made
        self.shards.read_into(name, made)
        return made


def _dicts(nested: object) -> dict[str, Any]:
    """Return the dicts in a dict: without a state, an optimizer or a parameter has an empty one, stored as a value."""
    held = nested if isinstance(nested, dict) else {}
    return {name: value for name, value in held.items() if isinstance(value, dict)}


def _is_laid_out_as(tensor: Tensor, like: Tensor) -> bool:
    """Return whether two tensors have the same shape and device, and are spread over ranks alike."""
    plain = type(local_part(tensor)) is Tensor and tensor.device == like.device
    return plain and tensor.shape == like.shape and spread_alike(tensor, like)


def _mapped(read: Callable[[str], object], nested: Any) -> Any:
    """Return nested dicts and lists with what `read` returns in place of each name."""
    if isinstance(nested, dict):
        return {key: _mapped(read, value) for key, value in nested.items()}
    return [_mapped(read, value) for value in nested] if isinstance(nested, list) else read(nested)


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
