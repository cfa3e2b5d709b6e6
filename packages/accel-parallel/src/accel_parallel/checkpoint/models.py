"""Stored weights of models by what lies there: shards, whole under FSDP's names, or as one process writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from accel_core.checkpoint import model, names
from accel_core.checkpoint.format import Source
from accel_core.checkpoint.model import ObjectWeights, StoredWeights
from accel_core.checkpoint.report import Finding, Restoration, finding_of, listed
from accel_core.errors import CheckpointError, CheckpointMismatchError
from accel_parallel.checkpoint.metadata import METADATA_NAME
from accel_parallel.checkpoint.reader import ShardFolder


class ShardedModel:
    """The weights of a model in a folder of shards, under the names of the bare model."""

    aliases: Mapping[str, str] = {}

    def __init__(self, shards: ShardFolder) -> None:
        self.path, self.shards = shards.path, shards
        self.stored = {str(path[-1]): name for name, path in shards.paths().items() if len(path) == 2}
        self.tensors: Mapping[str, Any] = {name: shards.like(own) for name, own in self.stored.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor in new memory on the CPU; a value that is not a tensor is returned unchanged."""
        return cast(Tensor, self.shards.read(self.stored[name]))

    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy one tensor into another; of a sharded one, only this rank's part is read."""
        self.shards.read_into(self.stored[name], destination)


def is_sharded(source: Source, folder: str) -> bool:
    """Return whether the checkpoint has a folder of shards of this name."""
    return f"{folder}/{METADATA_NAME}" in source.files()


def holds_local(source: Source, index: int) -> bool:
    """Return whether each rank wrote its own part of model `index`, as with LOCAL_STATE_DICT."""
    return names.local_model_name(index, 0) in source.files()


def shards_of(source: Source, folder: str) -> ShardFolder:
    """Open a folder of shards, which has to be complete."""
    source.check_listed(f"{folder}/{METADATA_NAME}")
    return ShardFolder(source.folder, folder)


def restoration(own: object, index: int, source: Source, rank: int) -> Restoration:
    """Compare the weights of model `index` in a checkpoint with a model, changing nothing."""
    component = f"model {index}"
    files: frozenset[str] = frozenset()
    try:
        weights, files = _open(index, source)
    except (CheckpointError, OSError) as error:
        return Restoration(component, findings=[finding_of(error, component, rank)])
    if weights is None:
        return model.restoration(own, index, source, rank)
    found = model.compare(own, weights, component, rank, **source.model_kwargs)
    found = replace(found, files=files)
    if isinstance(weights, ShardedModel):
        found.holds = {weights.shards.file(file): held for file, held in weights.shards.contents().items()}
        found.findings += damages(weights.shards, source, component, rank)
    return found


def damages(shards: ShardFolder, source: Source, component: str, rank: int) -> list[Finding]:
    """Return the damages of a component's shards."""
    wrong = shards.check()
    for file, held in shards.contents().items() if source.manifest is not None else ():
        if shards.file(file) not in source.files():
            wrong.setdefault(file, f"belongs to no save that is there; by its list it holds {listed(held)}")
    found = [Finding(component, "damaged", f"{shards.file(file)} {detail}", rank) for file, detail in wrong.items()]
    # Without a manifest there are no checksums: read each once, before a part of the run is restored.
    if source.manifest is not None or found:
        return found
    try:
        shards.read_once()
    except CheckpointError as error:
        return [finding_of(error, component, rank)]
    return []


def _open(index: int, source: Source) -> tuple[StoredWeights | None, frozenset[str]]:
    """Return the weights that only engines write, and their files; none where one process could have written them."""
    folder, whole = names.sharded(names.FSDP_MODEL_NAME, index), names.numbered(names.FSDP_MODEL_NAME, index)
    there = [name for name in (folder, whole) if name in source.files() or is_sharded(source, name)]
    if holds_local(source, index):
        there.append(names.local_model_name(index, 0))
    plain = [name for safe in (True, False) if (name := names.model_name(index, safe=safe)) in source.files()]
    if there and len([*there, *plain]) > 1:
        raise CheckpointMismatchError(
            f"Model {index} is stored there in several forms, of which one may be of an older save; got "
            f"{' and '.join([*there, *plain])}. Move the old one away."
        )
    if not there:
        return None, frozenset()
    if there == [folder]:
        shards = shards_of(source, folder)
        return ShardedModel(shards), frozenset(shards.files())
    if there == [whole]:
        source.check_listed(whole)
        return ObjectWeights(source.folder, whole), frozenset({whole})
    raise CheckpointMismatchError(
        f"Model {index} was saved as each of {source.world_size} ranks held it (LOCAL_STATE_DICT), which only FSDP "
        f"version 1 on {source.world_size} ranks with the same settings can load; got another run. Load it there and "
        "save with state_dict_type='SHARDED_STATE_DICT'."
    )
