"""The `.metadata` of a folder of shards: which tensors there are, in which pieces, and where each piece lies.

It is read into the records of `torch.distributed.checkpoint`, for its planners. torch itself reads it by `pickle`,
which runs whatever the file names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from accel_core._torch import storage_info
from accel_core.checkpoint.manifest import check_name
from accel_core.errors import CheckpointDamagedError, CheckpointError, UnsafeCheckpointError
from accel_parallel.checkpoint.closed_pickle import ForeignNameError, Opaque, load_closed

METADATA_NAME = ".metadata"
_RECORDS = (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata)
_OPAQUE = (
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    *("torch.distributed.checkpoint.metadata.TensorProperties", "torch.serialization._get_layout"),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
)


def decode(raw: bytes, path: Path) -> Metadata:
    """Read a `.metadata` file and make sure that what it says holds together; nothing is run that it names."""
    try:
        found: Metadata = load_closed(raw, _known(), (*_RECORDS, _place()))
        _check(found, path)
    except CheckpointError:
        raise
    except ForeignNameError as error:
        raise UnsafeCheckpointError(
            f"Reading {str(path)!r} with pickle would run code from the file; got {error}. Do not use this file."
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointDamagedError(
            f"The list of shards {str(path)!r} is damaged or of another version; got {error}. Load another checkpoint."
        ) from error
    return found


@functools.cache
def _known() -> dict[str, Any]:
    """Return what stands for each name that torch writes into a list of shards."""
    known: dict[str, Any] = {f"{kind.__module__}.{kind.__name__}": kind for kind in (*_RECORDS, _place())}
    known |= {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return known | dict.fromkeys(_OPAQUE, Opaque) | {"torch.Size": torch.Size}


def _place() -> type:
    return type(storage_info("", 0, 0))


def like_of(stored: TensorStorageMetadata) -> torch.Tensor:
    """Return a tensor without values, of the shape and dtype of a stored one."""
    properties: Any = stored.properties
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a dtype that torch does not have")
    return torch.empty(stored.size, dtype=dtype, device="meta")


def places_of(metadata: Metadata) -> dict[MetadataIndex, Any]:
    """Return where each piece and each object lies: `relative_path`, `offset` and `length`."""
    return cast(dict[MetadataIndex, Any], metadata.storage_data)


def _check(found: Metadata, path: Path) -> None:
    """Make sure that every value has its place, and that the pieces of a tensor are that tensor."""
    places = places_of(found)
    for place in places.values():
        check_name(place.relative_path, path)
        if min(_sizes((place.offset, place.length))) < 0:
            raise ValueError(f"a place in {place.relative_path} that is not one")
    for steps in (found.planner_data or {}).values():
        if type(steps) is not tuple or not steps or not all(type(step) in (str, int) for step in steps):
            raise ValueError("a path of something that is not a text or a number")
    for name, stored in found.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueError(f"a {type(name).__name__} where a name belongs")
        if isinstance(stored, BytesStorageMetadata):
            places[MetadataIndex(name)]
            continue
        itemsize = like_of(stored).dtype.itemsize
        for chunk in stored.chunks:
            count = math.prod(_sizes(chunk.sizes))
            if count and count * itemsize > places[MetadataIndex(name, chunk.offsets)].length:
                raise ValueError(f"a piece of {name} that is larger than its place")
        if not covers(stored):
            raise ValueError(f"pieces of {name} that do not make a tensor of shape {tuple(stored.size)}")


def covers(stored: TensorStorageMetadata) -> bool:
    """Return whether the pieces of a tensor lie inside of it, and have as many elements together."""
    bounds = _sizes(stored.size)
    inside = all(
        0 <= first <= first + count <= bound
        for chunk in stored.chunks
        for first, count, bound in zip(_sizes(chunk.offsets), _sizes(chunk.sizes), bounds, strict=True)
    )
    return inside and sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(bounds)


def _sizes(value: Iterable[int]) -> torch.Size:
    return torch.Size(value)  # raises for anything but integers
