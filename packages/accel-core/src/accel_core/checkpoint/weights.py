"""Saving the weights of one model into a folder that any reader of such folders understands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accel_core.checkpoint import names, payload
from accel_core.checkpoint.digest import flush_folder
from accel_core.checkpoint.in_place import Journal, model_journal
from accel_core.checkpoint.manifest import Manifest, versions
from accel_core.checkpoint.model import compare
from accel_core.checkpoint.report import RestoreReport
from accel_core.checkpoint.shards import open_weights
from accel_core.errors import CheckpointError
from accel_core.modules import offloaded
from accel_core.modules.sizes import convert_file_size_to_int
from accel_core.modules.unwrap import canonical_name, extract_model_from_parallel
from accel_core.process import world

__all__ = ["load_model", "save_model", "split"]


def save_model(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """Write the weights of a model, in several files if they are large, and remove weights of the same format.

    All files are one save: after a crash the weights are the old ones or the new ones. A reader that does not know
    accel's hidden folder may find them without the index that it needs; never shards of two saves under one index.

    Args:
        model: The model, wrapped or not.
        state_dict: Its full state under canonical names. Collected from the model, or from its offload store, if `None`
            or on the meta device.
        save_directory: Folder to write into; made if it is not there.
        max_shard_size: Bytes of weights in one file, or words such as `"5GB"`. A larger tensor gets a file of its own.
        safe_serialization: Write safetensors instead of `torch.save`.
        save_on_each_node: Write on the first process of every machine instead of on the first of all.

    Raises:
        CheckpointError: The folder is a file, a weight has no data, or writing failed; earlier files are intact.
        ValueError: `max_shard_size` cannot be read.
    """
    here = world.ensure()
    if not (here.is_local_main if save_on_each_node else here.is_main):
        return
    limit = convert_file_size_to_int(max_shard_size)
    folder = Path(save_directory)
    if folder.is_file():
        raise CheckpointError(
            f"Weights are saved into a folder; {str(folder)!r} is a file. Pass the folder that is to hold them."
        )
    if state_dict is None or any(getattr(value, "is_meta", False) for value in state_dict.values()):
        state_dict = _state_of(model)
    shards = split(state_dict, limit)
    pattern = names.SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else names.WEIGHTS_PATTERN_NAME
    suffixes = [f"-{number + 1:05d}-of-{len(shards):05d}" for number in range(len(shards))] if len(shards) > 1 else [""]
    files = {pattern.format(suffix=suffix): shard for suffix, shard in zip(suffixes, shards, strict=True)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder, files, safe_serialization)
    except OSError as error:
        raise CheckpointError(
            f"Weights could not be written to {str(folder)!r}; found {error}. Make room or choose another folder."
        ) from error


def _replace(folder: Path, files: Mapping[str, dict[str, Tensor]], safe: bool) -> None:
    """Write shards and their index, and let them take the places of the weights before: all of them or none."""
    journal = model_journal(folder)
    _settle(journal)
    identity = names.fresh_id()
    staging = journal.begin(identity)
    try:
        write = payload.write_tensors if safe else payload.write_object
        entries = [write(staging / name, shard) for name, shard in files.items()]
        if len(files) > 1:
            index = names.SAFE_WEIGHTS_INDEX_NAME if safe else names.WEIGHTS_INDEX_NAME
            entries.append(payload.write_json(staging / index, _index(files, safe)))
        journal.prepare(staging, _earlier(folder, safe), lambda name: not (folder / name).is_dir())
        Manifest(tuple(sorted(entries, key=lambda entry: entry.name)), 1, versions(), save=identity).write(staging)
        flush_folder(staging)
        committed = journal.commit(staging)
    except BaseException:
        journal.clear()
        raise
    journal.place(committed)
    journal.clear()


def _settle(journal: Journal) -> None:
    """Finish what a crash left of an earlier save, and delete the rest of it."""
    committed = journal.committed()
    if committed is not None:
        journal.place(committed)
    if os.path.lexists(journal.folder):
        journal.clear()
    for entry in os.scandir(journal.target):
        parsed = names.split_beside(entry.name)
        # Older versions wrote beside the files' places.
        if parsed is not None and names.is_shard(parsed[1]) and not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)


def _earlier(folder: Path, safe: bool) -> list[str]:
    """Return the names of weights in one of the two formats; weights in the other are no concern of a save in this."""
    suffix = ".safetensors" if safe else ".bin"
    return [
        name
        for name in os.listdir(folder)
        if names.is_shard(name) and name.removesuffix(".index.json").endswith(suffix)
    ]


def load_model(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> RestoreReport:
    """Read weights into a model, after all of them were found to fit.

    Args:
        model: The model, wrapped or not.
        path: Weights file, index file, or a folder that holds one of them.
        strict: Raise if a name is missing or unexpected, or a shape or dtype differs. Otherwise load what fits.

    Returns:
        What was loaded and what was not.

    Raises:
        CheckpointDamagedError: A file is truncated or of another kind; the model is as it was.
        CheckpointMismatchError: The weights do not fit the model; it is as it was.
        UnsafeCheckpointError: A file would run code, or the index leads out of its folder.
        CheckpointNotFoundError: There are no weights.
    """
    weights = open_weights(_whole(Path(path)))
    plan = compare(model, weights, "model")
    report = RestoreReport(Path(path), 1, findings=plan.findings)
    error = report.error()
    if strict and error is not None:
        raise error
    plan.apply()
    (report.partial if plan.findings else report.restored).append(plan.component)
    return report


def _whole(path: Path) -> Path:
    """Return where to read weights whose files are not all in their places yet: where a crash left them whole."""
    folder = path if path.is_dir() else path.parent
    committed = model_journal(folder).committed()
    if committed is None:
        return path
    if path.is_dir():
        return committed
    return committed / path.name if (committed / path.name).exists() else path


def split(state_dict: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split a state dict into shards of at most `limit` bytes, in order; what shares memory stays together.

    Args:
        state_dict: Names and tensors.
        limit: Bytes. A larger tensor gets a shard of its own.
    """
    shards: list[dict[str, Tensor]] = [{}]
    places: dict[Any, dict[str, Tensor]] = {}
    filled = 0
    for name, tensor in state_dict.items():
        key = payload.storage_key(tensor) if isinstance(tensor, Tensor) else (id(tensor),)
        if key in places:
            places[key][name] = tensor
            continue
        size = _bytes(tensor)
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        places[key] = shards[-1]
        filled += size
    return shards


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return {canonical_name(name): value for name, value in offloaded.state_dict(inner).items()}


def _index(files: Mapping[str, Mapping[str, Tensor]], safe: bool) -> dict[str, Any]:
    weight_map: dict[str, str] = {}
    total = 0
    for file, shard in files.items():
        seen: set[Any] = set()
        for name, tensor in shard.items():
            key = payload.storage_key(tensor) if isinstance(tensor, Tensor) else (id(tensor),)
            if key in seen and safe:
                continue
            total += 0 if key in seen else _bytes(tensor)
            seen.add(key)
            weight_map[name] = file
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
