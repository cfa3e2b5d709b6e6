"""Whole weights out of a folder that holds them in parts, one piece at a time."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
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
from accel_parallel.checkpoint.metadata import METADATA_NAME, Box, StoredTensor
from accel_parallel.checkpoint.reader import ShardFolder

__all__ = ["merge_command", "merge_folder", "merge_weights"]

_logger = logging.getLogger(__name__)
_MODEL = "model"
_OPTIMIZERS = ("optimizer", "optim", "state", "param_groups")
_SHOWN = 8


def merge_weights(
    source: Path, target: Path, *, max_shard_size: int | str = "10GB", safe_serialization: bool = True
) -> None:
    """Write the weights that lie in a folder in pieces as whole ones, with the dtypes that they have.

    All files come to their places together, or none of them. Safetensors are written piece by piece, so memory holds
    the largest tensor at most; torch's format needs a whole file. Matrices of floating-point numbers that are equal in
    all bits and not constant are ties: they are stored once, and the file notes the other names.

    Raises:
        CheckpointDamagedError: A shard is missing, cut off, or of another save.
        CheckpointMismatchError: The folder holds the state of an optimizer, or only folders in it hold shards; layers
            are split over ranks by tensor parallel.
        CheckpointNotFoundError: There are no weights.
        MissingDependencyError: The package of the engine that wrote the folder is not installed.
        CheckpointError: A value has no place in safetensors, or writing failed.
        UnsafeCheckpointError: Reading would run code, or leads out of the folder.
        ValueError: `max_shard_size` cannot be read.
    """
    limit = convert_file_size_to_int(max_shard_size)
    source = _engine_in(Path(os.path.realpath(source)))
    _refuse_parent(source)
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


def _engine_in(source: Path) -> Path:
    """Return the folder of an engine in that of a checkpoint; anything else as it is."""
    if not source.is_dir() or _reader_of(source) is not None:
        return source
    entries = sorted(os.scandir(source), key=lambda entry: entry.name)
    found = [entry.name for entry in entries if entry.is_dir() and _reader_of(Path(entry.path)) is not None]
    if not found:
        return source
    whole = [entry.name for entry in entries if names.is_model(entry.name)]
    if len(found) > 1 or whole:
        raise CheckpointMismatchError(
            f"Weights of one model are merged; got {', '.join([*found, *whole])} in {str(source)!r}. "
            f"Pass {' or '.join(str(source / name) for name in found)}."
        )
    return source / found[0]


def _refuse_parent(source: Path) -> None:
    """Refuse a folder that holds no shards where folders in it do, and name those."""
    if not source.is_dir() or (source / METADATA_NAME).exists():
        return
    inside = sorted(entry.name for entry in os.scandir(source) if os.path.exists(Path(entry.path) / METADATA_NAME))
    models = [name for name in inside if not name.startswith(names.OPTIMIZER_NAME)]
    if not inside:
        return
    advice = f"Pass {' or '.join(str(source / name) for name in models)}." if models else "Pass the folder of a model."
    raise CheckpointMismatchError(
        f"Weights are merged from the folder that holds the shards; got {str(source)!r}, which holds shards in "
        f"{', '.join(inside)}. {advice}"
    )


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
        bare: SpreadWeight(
            tuple(stored.shape), stored.dtype, partial(folder.read, name), partial(_pieces, folder, name, stored)
        )
        if (stored := folder.tensors.get(name)) is not None
        else folder.read_object(name)
        for bare, name in chosen.items()
    }
    for alias, first in _ties(folder, chosen).items():
        state[alias] = state[first]
    return state


def _names(folder: ShardFolder) -> dict[str, str]:
    """Return the names of a model's weights, and under which names they lie."""
    paths = {name: folder.metadata.path_of(name) for name in (*folder.tensors, *sorted(folder.metadata.objects))}
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
    _warn_of_newer(folder.path, listed)


def _warn_of_newer(folder: Path, listed: Mapping[str, object]) -> None:
    """Warn where some shards, but not all, are newer than their list, which is written last."""
    written = os.stat(folder / METADATA_NAME).st_mtime_ns
    newer = [name for name in sorted(listed) if os.stat(folder / name).st_mtime_ns > written]
    if newer and len(newer) < len(listed):
        _logger.warning(
            "Some shards in %s are newer than their list: %s. If nobody copied them one by one, they are of a save "
            "that did not finish; load another checkpoint then.",
            folder,
            ", ".join(newer[:_SHOWN]),
        )


def _pieces(folder: ShardFolder, name: str, stored: StoredTensor) -> Iterator[Tensor]:
    """Yield the values of a tensor in their order: pieces of whole rows as they lie there, of others runs of rows."""
    if not stored.shape:
        yield folder.read(name)
        return
    edges = sorted({edge for box in stored.boxes for edge in (box.offsets[0], box.offsets[0] + box.sizes[0])})
    for first, last in itertools.pairwise(edges):
        run = Box((first, *(0 for _ in stored.shape[1:])), (last - first, *stored.shape[1:]))
        if run in stored.boxes and run.numel:
            yield from folder.stream(name, run)
        else:
            yield folder.read_part(name, run)


def _ties(folder: ShardFolder, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the names of matrices whose values lie under an earlier name too, and that name."""
    same: dict[object, list[str]] = {}
    for bare, name in chosen.items():
        stored = folder.tensors.get(name)
        if stored is not None and stored.dtype.is_floating_point and len(stored.shape) > 1:
            key = (stored.dtype, stored.shape, tuple(sorted((box.offsets, box.sizes) for box in stored.boxes)))
            same.setdefault(key, []).append(bare)
    found: dict[str, str] = {}
    for group in same.values():
        by_sample: dict[bytes, list[str]] = {}
        for bare in group if len(group) > 1 else ():
            by_sample.setdefault(folder.sample(chosen[bare]), []).append(bare)
        for first, *others in by_sample.values():
            if others and not _is_constant(folder, chosen[first]):
                found |= {other: first for other in others if _are_equal(folder, chosen[first], chosen[other])}
    for alias, first in found.items():
        _logger.info("%s has the values of %s, and is written as another name for it.", alias, first)
    return found


def _is_constant(folder: ShardFolder, name: str) -> bool:
    """Return whether all values of a tensor are one: many weights begin as zeros or ones without being tied."""
    first: Tensor | None = None
    for piece in _bits_of(folder, name):
        first = piece[:1] if first is None else first
        if bool((piece != first).any()):
            return False
    return True


def _are_equal(folder: ShardFolder, one: str, other: str) -> bool:
    return all(torch.equal(*pair) for pair in zip(_bits_of(folder, one), _bits_of(folder, other), strict=True))


def _bits_of(folder: ShardFolder, name: str) -> Iterator[Tensor]:
    """Yield the pieces of a tensor as rows of one value each, in bits, so that equal means the same memory."""
    stored = folder.tensors[name]
    for box in sorted(stored.boxes, key=lambda box: box.offsets):
        if box.numel:
            yield folder.read_part(name, box).contiguous().view(torch.uint8).reshape(box.numel, -1)
