"""The `.metadata` of a folder of shards: which tensors there are, in which pieces, and where each piece lies."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_core._records import record
from accel_core.checkpoint.manifest import check_name
from accel_core.errors import CheckpointDamagedError, CheckpointError, UnsafeCheckpointError
from accel_parallel.checkpoint.closed_pickle import ForeignNameError, load_closed, record_of

__all__ = ["METADATA_NAME", "Box", "Metadata", "Place", "StoredTensor", "covers", "decode", "overlap"]

METADATA_NAME = ".metadata"
_DCP = "torch.distributed.checkpoint"
_LONGEST = 1 << 62


Key = tuple[str, tuple[int, ...] | None]
"""Name of a value and, for a tensor, where the piece begins."""


@record(frozen=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@record(frozen=True)
class Place:
    """Where a value lies."""

    file: str
    offset: int
    length: int  # number of bytes: a stream that `torch.save` wrote


@record(frozen=True)
class StoredTensor:
    """A tensor in pieces."""

    dtype: torch.dtype
    shape: torch.Size
    boxes: list[Box]


@record(frozen=True)
class Metadata:
    """What lies in a folder of shards."""

    tensors: Mapping[str, StoredTensor]  # each tensor by its name, such as `model.body.weight`
    objects: frozenset[str]
    # where in nested dicts and lists a value belongs, by its name; empty where nobody noted it
    paths: Mapping[str, tuple[str | int, ...]]
    places: Mapping[Key, Place]  # where each piece and each object lies

    def path_of(self, name: str) -> tuple[str | int, ...]:
        """Return the place of a value in nested dicts and lists."""
        return self.paths.get(name, tuple(name.split(".", 1)))

    def contents(self) -> dict[str, list[str]]:
        """Return the names of the values of which something lies in each file."""
        found: dict[str, dict[str, None]] = {}
        for (name, _), place in self.places.items():
            found.setdefault(place.file, {})[name] = None
        return {file: list(names) for file, names in found.items()}


def decode(raw: bytes, path: Path) -> Metadata:
    """Read a `.metadata` file of `torch.distributed.checkpoint`; only names of its records are looked up."""
    try:
        return _metadata(load_closed(raw, _known()), path)
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


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two parts of a tensor; `None` if it is empty.

    >>> overlap(Box((0, 0), (3, 3)), Box((2, 0), (3, 3)))
    Box(offsets=(2, 0), sizes=(1, 3))
    """
    starts = tuple(max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else Box(starts, sizes)


_RECORDS = {
    name: record_of(name)
    for name in (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix"),
    )
}


@functools.cache
def _known() -> dict[str, Any]:
    """Return what stands for each name that torch has written into a list of shards, in whichever module it was."""
    homes = (_DCP + ".metadata", _DCP + ".filesystem", "torch.distributed._shard.sharded_tensor.metadata")
    known: dict[str, Any] = {f"{home}.{name}": kind for home in homes for name, kind in _RECORDS.items()}
    known |= {f"pathlib.{name}": record_of(name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")}
    known |= {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return known | {"torch.Size": torch.Size, "torch.serialization._get_layout": record_of("layout")}


def _state(made: object, kind: str) -> Any:
    """Return the attributes of a record."""
    if type(made) is not _RECORDS[kind]:
        raise ValueError(f"a {type(made).__name__} where {kind} belongs")
    return made.state


def _metadata(described: Any, path: Path) -> Metadata:
    state = _state(described, "Metadata")
    known: dict[int, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    objects: set[str] = set()
    for name, made in _dict(state["state_dict_metadata"]).items():
        if type(made) is _RECORDS["BytesStorageMetadata"]:
            objects.add(_text(name))
        else:
            tensors[_text(name)] = _tensor(_state(made, "TensorStorageMetadata"), known)
    places = {_key(index): _place(made, path) for index, made in _dict(state["storage_data"]).items()}
    paths = {_text(name): _path(given) for name, given in _dict(state.get("planner_data") or {}).items()}
    found = Metadata(tensors, frozenset(objects), paths, places)
    _check(found)
    return found


def _check(found: Metadata) -> None:
    """Make sure that every value has its place, and that the pieces of a tensor are that tensor."""
    for name in found.objects:
        if (name, None) not in found.places:
            raise ValueError(f"no place of {name}")
    for name, stored in found.tensors.items():
        for box in (box for box in stored.boxes if box.numel):
            place = found.places.get((name, box.offsets))
            if place is None:
                raise ValueError(f"no place of a piece of {name}")
            if box.numel * stored.dtype.itemsize > place.length:
                raise ValueError(f"a piece of {name} that is larger than its place")
        if not covers(stored.shape, stored.boxes):
            raise ValueError(f"pieces of {name} that do not make a tensor of shape {tuple(stored.shape)}")


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether pieces make up a tensor, with each element in exactly one.

    >>> covers((3, 2), [Box((0, 0), (2, 2)), Box((2, 0), (1, 2))]), covers((3,), [Box((0,), (2,)), Box((1,), (1,))])
    (True, False)
    """
    whole = Box((0,) * len(shape), tuple(shape))
    filled = [box for box in boxes if box.numel]
    if any(len(box.offsets) != len(whole.sizes) or len(box.sizes) != len(whole.sizes) for box in boxes):
        return False
    for box in filled:
        if whole.sizes and overlap(whole, box) != box:
            return False
    if sum(box.numel for box in filled) != whole.numel:
        return False
    along = max(range(len(whole.sizes)), key=whole.sizes.__getitem__, default=0)
    filled.sort(key=lambda box: box.offsets[along : along + 1])
    for number, box in enumerate(filled):
        for other in filled[number + 1 :]:
            if not whole.sizes or other.offsets[along] >= box.offsets[along] + box.sizes[along]:
                break
            if overlap(box, other) is not None:
                return False
    return True


def _tensor(state: Any, known: dict[int, Any]) -> StoredTensor:
    """Return a tensor; what several share, by `known`, is made once, so that memory stays that of the file."""
    properties = _state(state["properties"], "TensorProperties")
    dtype = properties[0] if type(properties) is tuple else _dict(properties)["dtype"]
    listed = state["chunks"]
    if type(listed) is not list:
        raise ValueError(f"a {type(listed).__name__} where a list of pieces belongs")
    for made in listed:
        if id(made) not in known:
            chunk = _state(made, "ChunkStorageMetadata")
            known[id(made)] = Box(_size(chunk["offsets"]), _size(chunk["sizes"]))
    if id(listed) not in known:
        known[id(listed)] = [known[id(made)] for made in listed]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a dtype that torch does not have")
    return StoredTensor(dtype, torch.Size(_size(state["size"])), known[id(listed)])


def _key(made: object) -> Key:
    state = _state(made, "MetadataIndex")
    offset = state.get("offset")
    return _text(state["fqn"]), None if offset is None else _size(offset)


def _place(made: object, path: Path) -> Place:
    state = _state(made, "_StorageInfo")
    if state.get("transform_descriptors"):
        raise ValueError("pieces that an extension of torch transformed")
    file = _text(state["relative_path"])
    check_name(file, path)
    if "/" in file:
        raise UnsafeCheckpointError(
            f"The shards that {str(path)!r} lists have to be next to it; got {file!r}. Do not use this checkpoint."
        )
    offset, length = state["offset"], state["length"]
    if not (_is_length(offset) and _is_length(length)):
        raise ValueError(f"a place in {file} that is not one")
    return Place(file, offset, length)


def _path(given: object) -> tuple[str | int, ...]:
    if type(given) is not tuple or not given or not all(type(step) in (str, int) for step in given):
        raise ValueError("a path of something that is no text or number")
    return given


def _size(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(_is_length(size) for size in value):
        raise ValueError(f"a {type(value).__name__} where a size belongs")
    return tuple(value)


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < _LONGEST


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__} where a dict belongs")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} where a name belongs")
    return value
