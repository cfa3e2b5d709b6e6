"""Comparing stored weights with a model, and putting them into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from accel_core.checkpoint import names, pickles, tensor_file
from accel_core.checkpoint.format import Source
from accel_core.checkpoint.manifest import damaged_file
from accel_core.checkpoint.report import Finding, Kind, Restoration, finding_of
from accel_core.errors import CheckpointError
from accel_core.mesh.tensor import fill, is_spread
from accel_core.modules.ties import tied_tensor_groups
from accel_core.modules.unwrap import canonical_name, extract_model_from_parallel

_FILLERS = 2
_SHARED_OUT = 64 << 20
"""Bytes of weights from which on threads pay."""


class StoredWeights(Protocol):
    """Weights in a file, under canonical names."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Something with a `shape` and a `dtype` for each name."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names, and the names under which their values are stored."""

    def read(self, name: str) -> Tensor:
        """Return one tensor in new memory on the CPU.

        Args:
            name: Its name in the file.
        """

    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy one tensor into `destination`.

        Args:
            name: The tensor's name in the file.
            destination: A tensor of the same shape.
        """


class ObjectWeights:
    """Weights that `torch.save` wrote."""

    aliases: Mapping[str, str] = {}

    def __init__(self, folder: Path, name: str, *, links: bool = False) -> None:
        content = pickles.read_object(folder, name, links=links, mmap=True)
        if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
            raise damaged_file(folder / name, f"a {type(content).__name__} where a state dict of tensors belongs")
        self.path = folder / name
        self.tensors: dict[str, Any] = dict(content)

    def read(self, name: str) -> Tensor:
        """Return one tensor in new memory on the CPU; non-tensors are returned unchanged."""
        value = self.tensors[name]
        return value.clone() if isinstance(value, Tensor) else value

    @torch.no_grad()
    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy one tensor into `destination`."""
        fill(destination, self.tensors[name])


def open_weights(folder: Path, name: str, *, links: bool = False) -> StoredWeights:
    """Open the weights in a file; its extension tells the format."""
    if name.endswith(".safetensors"):
        return tensor_file.TensorFile(folder, name, links=links)
    return ObjectWeights(folder, name, links=links)


def restoration(model: object, index: int, source: Source, rank: int) -> Restoration:
    """Compare the weights of model `index` in a checkpoint with a model, changing nothing."""
    component = f"model {index}"
    plain, safe = names.model_name(index, safe=False), names.model_name(index, safe=True)
    try:
        # A file of the other format may be there, of another save.
        listed = source.files()
        name = safe if safe in listed or plain not in listed else plain
        source.check_listed(name)
        weights = open_weights(source.folder, name)
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    found = compare(model, weights, component, rank, **source.model_kwargs)
    return replace(found, files=frozenset({weights.path.name}))


def compare(model: object, weights: StoredWeights, component: str, rank: int = 0, **kwargs: object) -> Restoration:
    """Compare weights with a model, changing nothing."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    state = inner.state_dict()
    actual = {canonical_name(key): key for key in state}
    tensors, aliases = weights.tensors, weights.aliases
    stored = {canonical_name(name): name for name in (*tensors, *aliases)}
    findings: list[Finding] = []

    def note(kind: Kind, detail: str) -> None:
        findings.append(Finding(component, kind, detail, rank))

    reached = _reached(inner, state, [actual[name] for name in stored.keys() & actual.keys()])
    fitting: dict[str, str] = {}
    for name, key in actual.items():
        value = state[key]
        if name not in stored:
            if not (isinstance(value, Tensor) and tensor_file.storage_key(value) in reached):
                note("missing", f"{name} is not in the checkpoint")
            continue
        raw = stored[name]
        problem = _difference(value, tensors[aliases.get(raw, raw)])
        if problem:
            note("mismatch", f"{name} {problem}")
        else:
            fitting[key] = raw
    known = {stored[name] for name in stored.keys() & actual.keys()}
    for name in sorted(stored.keys() - actual.keys()):
        if aliases.get(stored[name]) not in known:  # another name of a weight that the model has is expected
            note("unexpected", f"{name} is not in the model")
    apply = partial(_apply, inner, state, fitting, weights, kwargs)
    return Restoration(component, apply, findings, partial=True)


def _reached(inner: torch.nn.Module, state: Mapping[str, Any], given: list[str]) -> set[tuple[Any, ...]]:
    """Return which memory of a model is filled when the names in `given` are, under whatever names it is known."""
    filled = set(given)
    # A part of a spread weight may be empty, and then only names tell what is tied.
    for group in tied_tensor_groups(inner):
        if not filled.isdisjoint(group):
            filled.update(name for name in group if name in state)
    return {tensor_file.storage_key(state[name]) for name in filled if isinstance(state[name], Tensor)}


def _apply(
    inner: torch.nn.Module,
    state: dict[str, Any],
    fitting: dict[str, str],
    weights: StoredWeights,
    kwargs: dict[str, Any],
) -> None:
    """Put weights into a model; `fitting` has the stored name of each of its names."""
    if kwargs or _has_own_loading(inner) or not all(isinstance(state[key], Tensor) for key in fitting):
        given = {key: _read(weights, raw, state[key]) for key, raw in fitting.items()}
        inner.load_state_dict(given, strict=False, **kwargs)
        return
    # Of tied names the first in the model's order is read.
    wanted = {tensor_file.storage_key(state[key]): key for key in reversed(fitting)}
    _fill([(fitting[key], state[key]) for key in reversed(wanted.values())], weights)


def _fill(wanted: list[tuple[str, Tensor]], weights: StoredWeights) -> None:
    """Read weights into tensors: many plain ones on two cores, as one core copies slower than memory takes it."""
    plain = [each for each in wanted if type(each[1]) in (Tensor, torch.nn.Parameter) and each[1].device.type == "cpu"]
    # Other threads are not in the inference mode of this one, without which inference tensors cannot be filled.
    if torch.is_inference_mode_enabled() or sum(tensor_file.bytes_of(tensor) for _, tensor in plain) < _SHARED_OUT:
        plain = []
    straight = {name for name, _ in plain}
    for name, tensor in wanted:  # in the same order on every rank, as spread tensors may be filled together
        if name not in straight:
            weights.read_into(name, tensor)
    if plain:
        with ThreadPoolExecutor(_FILLERS, thread_name_prefix="accel-checkpoint") as pool:
            for _ in pool.map(lambda each: weights.read_into(*each), plain):
                pass


def _read(weights: StoredWeights, name: str, like: object) -> object:
    """Return a stored value as the model holds it: of one that is spread, only this rank's part is read."""
    if not isinstance(like, Tensor) or not is_spread(like):
        return weights.read(name)
    part = torch.empty_like(like.detach())
    weights.read_into(name, part)
    return part


def _has_own_loading(module: torch.nn.Module) -> bool:
    """Return whether a part of the model wants to see the state dict that is loaded into it."""
    plain = torch.nn.Module._load_from_state_dict
    for part in module.modules():
        if part._load_state_dict_post_hooks or not all(map(_is_fsdps, part._load_state_dict_pre_hooks.values())):
            return True
        method = type(part)._load_from_state_dict
        if method is not plain and not type(part).__module__.startswith("torch.nn.modules."):
            return True
    return False


def _is_fsdps(hook: Any) -> bool:
    """Return whether `fully_shard` put a hook there: it shards what is whole, as the one for saving has done."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp.")


def _difference(value: object, entry: Any) -> str | None:
    if not isinstance(value, Tensor) or not hasattr(entry, "shape"):
        same_type = type(value) is type(entry)
        return None if same_type else f"is a {type(entry).__name__} instead of a {type(value).__name__}"
    if value.device.type == "meta":
        return "has no memory in the model: it is on the meta device"
    if tuple(value.shape) != tuple(entry.shape):
        return f"has shape {tuple(entry.shape)} instead of {tuple(value.shape)}"
    if value.dtype != entry.dtype:
        return f"has dtype {entry.dtype} instead of {value.dtype}"
    return None


class StateOnlyModel(torch.nn.Module):
    """A state in the place of a model, for formats whose engine holds the weights; tied ones are one tensor."""

    def __init__(self, state: dict[str, Any], ties: Sequence[Sequence[str]] = ()) -> None:
        super().__init__()
        self.state = state
        for group in ties:
            there = [name for name in map(canonical_name, group) if name in state]
            state.update(dict.fromkeys(there, state[there[0]]) if there else {})

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:  # type: ignore[override]
        """Return the state itself, without a copy."""
        return self.state

    def load_state_dict(self, state_dict: Any, *args: object, **kwargs: object) -> Any:
        """Update the state with the given entries."""
        self.state.update(state_dict)
