"""Whole weights out of a folder that holds them in parts, one piece at a time."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.remote.weights import local_weights
from accel_core.checkpoint.shards import open_weights
from accel_core.checkpoint.tensor_file import SpreadWeight
from accel_core.checkpoint.weights import split, write_shards
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
)
from accel_core.modules.sizes import convert_file_size_to_int
from accel_core.options.engines import absent, engines, load, require
from accel_core.process import world
from accel_parallel.checkpoint.metadata import METADATA_NAME
from accel_parallel.checkpoint.reader import ShardFolder

_logger = logging.getLogger(__name__)
_MODEL = "model"
_OPTIMIZERS = ("optimizer", "optim", "state", "param_groups")
_SHOWN = 8


def merge_weights(
    source: Path, target: Path, *, max_shard_size: int | str = "10GB", safe_serialization: bool = True
) -> None:
    """Write the weights that lie in a folder in pieces, or in the one such folder in it, as whole ones in their dtypes.

    All files come to their places together, or none of them. Safetensors are written piece by piece, so memory holds
    the largest tensor at most; torch's format needs a whole file. Matrices of floating-point numbers that are equal in
    all bits and not constant are ties: they are stored once, and the file notes the other names.

    Raises:
        CheckpointDamagedError: A shard is missing, cut off, or of another save.
        CheckpointMismatchError: The folder holds the state of an optimizer, or several models; layers are split over
            ranks by tensor parallel.
        CheckpointNotFoundError: There are no weights.
        MissingDependencyError: The package of the engine that wrote the folder is not installed.
        CheckpointError: A value has no place in safetensors, or writing failed.
        UnsafeCheckpointError: Reading would run code, or leads out of the folder.
        ValueError: `max_shard_size` cannot be read.
    """
    limit = convert_file_size_to_int(max_shard_size)
    source = _parts_in(Path(os.path.realpath(source)))
    reader = _reader_of(source)
    if reader is not None:
        state = reader()
    else:
        state = _in_shards(source) if (source / METADATA_NAME).exists() else _in_files(source)
    write_shards(target, split(state, limit), safe_serialization)


def merge_folder(
    checkpoint_dir: str, output_path: str, safe_serialization: bool, remove_checkpoint_dir: bool, max_shard_size: str
) -> None:
    """Merge on the main process, and remove the folder afterwards where that is asked for."""
    target = names.folder_of(output_path)
    if remove_checkpoint_dir and isinstance(names.folder_of(checkpoint_dir), Address):
        raise ConfigurationError(f"Only folders are removed; got the address {checkpoint_dir}. Delete it in its store.")
    source = local_weights(checkpoint_dir)
    if not source.is_dir():
        raise CheckpointNotFoundError(
            f"The folder of weights to merge does not exist; got {checkpoint_dir}. Check the path."
        )
    if remove_checkpoint_dir and target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"The folder to remove would hold the merged weights; got {output_path} in {checkpoint_dir}. Name another "
            "folder for them, or keep the checkpoint."
        )
    if not world.ensure().is_main:
        return
    merge_weights(source, target, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(source)


def merge_command(args: argparse.Namespace) -> None:
    """Merge weights, as a command line asks."""
    kept = not args.unsafe_serialization
    merge_folder(args.checkpoint_directory, args.output_path, kept, args.remove_checkpoint_dir, args.max_shard_size)


def _reader_of(folder: Path) -> Callable[[], Mapping[str, object]] | None:
    """Return what reads the weights of a folder that only one engine writes; `None` for anything else."""
    known = [load(engine.merges) for engine in engines().values() if engine.merges] if folder.is_dir() else []
    return next(filter(None, (reader_of(folder) for reader_of in known)), None)


def _parts_in(source: Path) -> Path:
    """Return the folder that holds a model in parts: this one, or the one in that of a checkpoint."""
    if not source.is_dir() or _holds_parts(source):
        return source
    inside = sorted(entry.name for entry in source.iterdir() if _holds_parts(entry) or names.is_model(entry.name))
    found = [name for name in inside if not name.startswith(names.OPTIMIZER_NAME)]
    if len(found) > 1:
        raise CheckpointMismatchError(
            f"Weights of one model are merged; got {', '.join(found)} in {str(source)!r}. "
            f"Pass {' or '.join(str(source / name) for name in found)}."
        )
    return source / found[0] if found and _holds_parts(source / found[0]) else source


def _holds_parts(folder: Path) -> bool:
    return (folder / METADATA_NAME).exists() or _reader_of(folder) is not None


def _in_files(source: Path) -> dict[str, SpreadWeight]:
    """Return the weights of whole files, each read when it is written."""
    _refuse_absent(source)
    weights = open_weights(source)
    lazy = {
        name: SpreadWeight(tuple(stored.shape), stored.dtype, partial(weights.read, name))
        for name, stored in weights.tensors.items()
    }
    return lazy | {alias: lazy[name] for alias, name in weights.aliases.items()}


def _refuse_absent(source: Path) -> None:
    """Refuse weights of an engine whose package, which reads them, is not installed."""
    inside = [f"{source.name}/{name}" for name in os.listdir(source)] if source.is_dir() else []
    found = {names.engine_of(name) for name in (*inside, *(names.found_in(source) if inside else ()))}
    for known in absent():
        if known.title in found:
            require(known.word, f"its weights in {str(source)!r}")


def _in_shards(source: Path) -> dict[str, object]:
    """Return the weights of a folder of shards under the model's names, each read when it is written."""
    folder = ShardFolder(source.parent, source.name, links=True)
    chosen = _names(folder)
    _refuse_mixture(folder)
    state: dict[str, object] = {
        bare: SpreadWeight(tuple(stored.shape), stored.dtype, partial(folder.read, name), partial(folder.pieces, name))
        if (stored := folder.tensors.get(name)) is not None
        else folder.read(name)
        for bare, name in chosen.items()
    }
    for alias, first in _ties(folder, chosen).items():
        state[alias] = state[first]
    return state


def _names(folder: ShardFolder) -> dict[str, str]:
    """Return the names of a model's weights, and under which names they lie."""
    paths = folder.paths()
    roots = {str(path[0]) for path in paths.values() if len(path) > 1}
    if _MODEL in roots:
        inside = {name: path[1:] for name, path in paths.items() if path[0] == _MODEL and len(path) > 1}
        return {".".join(map(str, path)): name for name, path in inside.items()}
    if roots & set(_OPTIMIZERS):
        raise CheckpointMismatchError(
            f"The folder {str(folder.path)!r} holds no weights; got the state of an optimizer. "
            f"Pass the folder of a model, such as {str(folder.path.parent / 'pytorch_model_fsdp_0')!r}."
        )
    return {name: name for name in paths}


def _refuse_mixture(folder: ShardFolder) -> None:
    """Refuse shards that do not all belong to the save that the list describes, as far as that can be seen."""
    listed = folder.contents()
    wrong = folder.check()
    unlisted = sorted({path.name for path in folder.path.glob("*.distcp")} - listed.keys())
    manifest = Manifest.read(folder.path.parent)
    if manifest is not None and not wrong:
        known = [*(name for name in folder.files() if name in manifest), *manifest.lost]
        wrong = {name.rpartition("/")[2]: what for name, what in manifest.damages(folder.path.parent, known).items()}
    problems = [f"{name} {what}" for name, what in wrong.items()]
    problems += [f"{name} is in no list" for name in unlisted]
    if problems:
        raise CheckpointDamagedError(
            f"The shards in {str(folder.path)!r} are not those of one save; got {'; '.join(problems[:_SHOWN])}"
            f"{' …' if len(problems) > _SHOWN else ''}. Bring all of its shards, and only these, into the folder."
        )


def _ties(folder: ShardFolder, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the names of matrices whose values lie under an earlier name too, and that name."""
    alike: dict[object, list[str]] = {}
    for bare, name in chosen.items():
        stored = folder.tensors.get(name)
        if stored is not None and stored.dtype.is_floating_point and stored.dim() > 1 and stored.numel():
            beginning = digest_of_bytes(next(folder.bytes_of(name)))
            alike.setdefault((stored.dtype, stored.shape, beginning), []).append(bare)
    found: dict[str, str] = {}
    for first, *others in alike.values():
        # Many weights begin as zeros or ones without being tied.
        if others and not _is_constant(folder.read(chosen[first])):
            found |= {other: first for other in others if _are_equal(folder, chosen[first], chosen[other])}
    for alias, first in found.items():
        _logger.info("%s has the values of %s, and is written as another name for it.", alias, first)
    return found


def _is_constant(tensor: Tensor) -> bool:
    bits = tensor.contiguous().view(torch.uint8).reshape(tensor.numel(), -1)
    return bool((bits == bits[:1]).all())


def _are_equal(folder: ShardFolder, one: str, other: str) -> bool:
    return all(mine == theirs for mine, theirs in zip_longest(folder.bytes_of(one), folder.bytes_of(other)))
