"""Saving the weights of one model into a folder that any reader of such folders understands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accel_core.checkpoint import commit, manifest, names, pickles, tensor_file
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.manifest import Entry
from accel_core.checkpoint.model import compare
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.remote.weights import local_weights, put_weights
from accel_core.checkpoint.report import RestoreReport
from accel_core.checkpoint.shards import open_weights
from accel_core.checkpoint.tensor_file import SpreadWeight, bytes_of, in_file_order
from accel_core.errors import CheckpointError, undone_by
from accel_core.mesh.tensor import is_spread, whole, whole_on_first
from accel_core.modules import offloaded
from accel_core.modules.sizes import convert_file_size_to_int
from accel_core.modules.ties import tied_tensor_groups
from accel_core.modules.unwrap import canonical_name, extract_model_from_parallel
from accel_core.process.world import ensure
from accel_core.tqdm import moved


def weights_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a model under canonical names; sharded ones as a `SpreadWeight`."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    first = {name: group[0] for group in tied_tensor_groups(inner) for name in group}
    spread: dict[str, SpreadWeight] = {}
    for name, value in inner.state_dict().items():
        if is_spread(value):
            # Names tell what is tied on all ranks alike; memory would not where a rank's part is empty.
            lazy = SpreadWeight(
                tuple(value.shape), value.dtype, partial(whole, value), gather_on_first=partial(whole_on_first, value)
            )
            value = spread.setdefault(first.get(name, name), lazy)
        yield canonical_name(name), value


def save_model(
    model: nn.Module,
    weights: Iterable[tuple[str, Any]] | None,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """Write the weights of a model, in several files if they are large, and remove weights of the same format.

    All files are one save: after a crash the weights are the old ones or the new ones. A reader that does not know
    accel's hidden folder may find them without the index that it needs; never shards of two saves under one index.
    Where weights are spread over ranks every rank calls it, and only those that write keep more than their parts.
    """
    world = ensure()
    limit, folder = convert_file_size_to_int(max_shard_size), names.folder_of(save_directory)
    writes = world.is_local_main if save_on_each_node and not isinstance(folder, Address) else world.is_main
    state = dict(weights_of(model) if weights is None else weights)
    moved(0, sum(map(bytes_of, state.values())))
    first_only = not save_on_each_node or world.local_size == world.size
    turns = _Turns(state, limit, safe_serialization, first_only=first_only)
    if not turns.left:
        if writes:
            if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
                inner = extract_model_from_parallel(model, keep_torch_compile=False)
                state = {canonical_name(name): value for name, value in offloaded.state_dict(inner).items()}
            _write_and_warn(folder, split(state, limit), safe_serialization)
        return
    with Ranks(world, "save_model").together(f"Saving weights to {str(folder)!r}"):
        try:
            if writes:
                _write_and_warn(folder, turns.shards, safe_serialization)
        finally:
            while turns.left:  # a rank that does not write, or failed, gathers all the same, and keeps nothing
                turns.left.pop(0)()


def _write_and_warn(folder: Path, shards: Sequence[Mapping[str, Any]], safe: bool) -> None:
    write_shards(folder, shards, safe)
    for shard in shards if safe else ():
        tensor_file.warn_of_shared(shard)


class _Turns:
    """The gathers of a save, which all ranks do in one order whatever becomes of the files.

    `shards` are what goes into each file: to gather from one takes a turn. `left` is what is still to be gathered.
    """

    def __init__(self, state: Mapping[str, Any], limit: int, safe: bool, *, first_only: bool) -> None:
        turns: dict[int, SpreadWeight] = {}
        self.left: list[SpreadWeight] = []
        self.shards: list[dict[str, Any]] = []
        for shard in split(state, limit):
            storable = safe and all(isinstance(value, Tensor | SpreadWeight) for value in shard.values())
            for _, value in in_file_order(shard) if storable else shard.items():
                if isinstance(value, SpreadWeight) and id(value) not in turns:
                    gather = value.gather_on_first if first_only and value.gather_on_first else value.gather
                    weight = replace(value, gather=gather)
                    turns[id(value)] = replace(value, gather=partial(self._take, weight))
                    self.left.append(weight)
            self.shards.append({name: turns.get(id(value), value) for name, value in shard.items()})

    def _take(self, weight: SpreadWeight) -> Tensor:
        self.left.remove(weight)
        return weight()


def write_shards(folder: Path, shards: Sequence[Mapping[str, Any]], safe: bool) -> None:
    """Write files of weights and their index into a folder, in place of weights of the same format: all or none."""
    if isinstance(folder, Address):
        put_weights(folder, partial(write_shards, shards=shards, safe=safe))
        return
    pattern = names.SAFE_WEIGHTS_PATTERN_NAME if safe else names.WEIGHTS_PATTERN_NAME
    suffixes = [f"-{number + 1:05d}-of-{len(shards):05d}" for number in range(len(shards))] if len(shards) > 1 else [""]
    files = {pattern.format(suffix=suffix): shard for suffix, shard in zip(suffixes, shards, strict=True)}
    try:
        _replace(folder, files, safe)
    except OSError as error:
        raise CheckpointError(
            f"Weights could not be written to {str(folder)!r}; got {error}. Make room or choose another folder."
        ) from error


def _replace(folder: Path, files: Mapping[str, Mapping[str, Any]], safe: bool) -> None:
    """Write shards and their index, and let them take the places of the weights before: all of them or none."""
    staging = commit.stage(folder, names.fresh_id())
    index = names.SAFE_WEIGHTS_INDEX_NAME if safe else names.WEIGHTS_INDEX_NAME
    with undone_by(lambda: commit.clear(staging)):
        for name, shard in files.items():
            (tensor_file.write_tensors if safe else _write_gathered)(staging / name, shard)
        if len(files) > 1:
            manifest.write_json(staging / index, _index(files, safe))
        # Weights in the other format are not its concern.
        suffix = ".safetensors" if safe else ".bin"
        shards = [name for name in os.listdir(folder) if names.is_shard(name) and not (folder / name).is_dir()]
        stale = {name for name in shards if name.removesuffix(".index.json").endswith(suffix)}
        # The index tells readers that shards are complete.
        commit.publish(staging, folder, stale=stale - commit.files_in(staging).keys(), last=[index])


def _write_gathered(path: Path, shard: Mapping[str, Any]) -> Entry:
    """Write a shard with `torch.save`, which needs all of it at once, and would write empty tensors too."""
    empty = [name for name, value in shard.items() if isinstance(value, Tensor) and value.is_meta]
    if empty:
        raise CheckpointError(
            f"A file of weights holds tensors with data only; got {', '.join(empty)} on the meta device. Give the "
            "model its weights first."
        )
    gathered: dict[int, Tensor] = {}
    for value in shard.values():
        if isinstance(value, SpreadWeight) and id(value) not in gathered:
            gathered[id(value)] = value().cpu()
    return pickles.write_object(path, {name: gathered.get(id(value), value) for name, value in shard.items()})


def load_model(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> RestoreReport:
    """Read weights into a model, after all of them were found to fit."""
    weights = open_weights(commit.standing_file(local_weights(path)))
    plan = compare(model, weights, "model")
    report = RestoreReport(Path(path), 1, findings=plan.findings)
    error = report.error()
    if strict and error is not None:
        raise error
    plan.apply()
    (report.partial if plan.findings else report.restored).append(plan.component)
    return report


def split(state_dict: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Split a state dict into shards of at most `limit` bytes, in order; tensors that share memory stay together."""
    shards: list[dict[str, Any]] = [{}]
    places: dict[Any, dict[str, Any]] = {}
    filled = 0
    for name, tensor in state_dict.items():
        key = tensor_file.storage_key(tensor)
        if key in places:
            places[key][name] = tensor
            continue
        size = bytes_of(tensor)
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        places[key] = shards[-1]
        filled += size
    return shards


def _index(files: Mapping[str, Mapping[str, Any]], safe: bool) -> dict[str, Any]:
    weight_map: dict[str, str] = {}
    total = 0
    for file, shard in files.items():
        seen: set[Any] = set()
        for name, tensor in shard.items():
            key = tensor_file.storage_key(tensor)
            if key in seen and safe:  # the file has it under its first name alone
                continue
            total += 0 if key in seen else bytes_of(tensor)
            seen.add(key)
            weight_map[name] = file
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
