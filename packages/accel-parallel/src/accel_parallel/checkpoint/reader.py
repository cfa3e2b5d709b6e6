"""Reading a folder of shards: whole tensors, or the part of them that this rank holds.

torch plans which pieces a part of a tensor is read from. Its `FileSystemReader` is not used: it unpickles `.metadata`
and values without a list of what is allowed, follows links out of the folder, and does not name a damaged file.
"""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from accel_core.checkpoint import pickles
from accel_core.checkpoint.manifest import damaged_file, open_member
from accel_core.checkpoint.report import listed
from accel_core.comm.transport import memory_of
from accel_core.errors import CheckpointDamagedError, CheckpointNotFoundError
from accel_core.mesh.tensor import local_parts
from accel_parallel.checkpoint.located import locate_values
from accel_parallel.checkpoint.metadata import METADATA_NAME, decode, like_of, places_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PART = 1 << 20


class ShardFolder:
    """A folder that `torch.distributed.checkpoint` wrote, or accel in its format, opened for reading.

    Opening reads the list of shards only. No collective is called by any method, and nothing is run from the files.
    """

    def __init__(self, checkpoint: Path, name: str = "", *, links: bool = False) -> None:
        self.path = checkpoint / name
        self._checkpoint, self._name, self._links = checkpoint, name, links
        try:
            with open(open_member(checkpoint, self.file(METADATA_NAME), links=links), "rb") as file:
                raw = file.read()
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"The list of shards {str(self.path / METADATA_NAME)!r} does not exist; got nothing to read. Pass a "
                "folder that holds .metadata and .distcp files."
            ) from error
        self.metadata = decode(raw, self.path / METADATA_NAME)
        self._places = places_of(self.metadata)
        # Without values: each has the shape and the dtype of what is stored under its name.
        self.tensors = {
            name: like_of(stored)
            for name, stored in self.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._sizes = {
            MetadataIndex(name, box.offsets): box.sizes
            for name in self.tensors
            for box in self._stored(name).chunks
            if 0 not in box.sizes
        }
        self.objects = sorted(self.metadata.state_dict_metadata.keys() - self.tensors.keys())

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Return where in nested dicts and lists each value belongs, by its name."""
        noted = self.metadata.planner_data or {}
        return {name: noted.get(name, tuple(name.split(".", 1))) for name in (*self.tensors, *self.objects)}

    def file(self, name: str) -> str:
        """Return the path of a shard relative to the checkpoint."""
        return f"{self._name}/{name}" if self._name else name

    def files(self) -> list[str]:
        """Return the names of the list and of all shards, as seen from the checkpoint."""
        return sorted(self.file(name) for name in {METADATA_NAME, *self.contents()})

    def contents(self) -> dict[str, list[str]]:
        """Return the names of the values of which something lies in each shard; shards by their names here."""
        found: dict[str, dict[str, None]] = {}
        for index, place in self._places.items():
            found.setdefault(place.relative_path, {})[index.fqn] = None
        return {file: list(names) for file, names in found.items()}

    def check(self) -> dict[str, str]:
        """Return what is wrong with each shard that is missing or shorter than the list says, with what it held."""
        contents, ends = self.contents(), dict[str, int]()
        for place in self._places.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        wrong: dict[str, str] = {}
        for name in sorted(ends):
            try:
                descriptor = open_member(self._checkpoint, self.file(name), links=self._links)
            except (FileNotFoundError, NotADirectoryError):
                wrong[name] = f"is not there; it holds {listed(contents[name])}"
                continue
            size = os.fstat(descriptor).st_size
            os.close(descriptor)
            if size < ends[name]:
                wrong[name] = f"has {size} bytes instead of {ends[name]}; it holds {listed(contents[name])}"
        return wrong

    def like(self, name: str) -> object:
        """Return something with the `shape` and `dtype` of a stored tensor, or a value that is not a tensor."""
        return self.tensors[name] if name in self.tensors else self.read(name)

    def read(self, name: str) -> Any:
        """Return one tensor, whole, in new memory on the CPU, or a value that is not a tensor."""
        if name not in self.tensors:
            return self._read(MetadataIndex(name))
        made = torch.empty_like(self.tensors[name], device="cpu")
        self.read_into(name, made)
        return made

    @torch.no_grad()
    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy one tensor into another; of a sharded one, only this rank's part is read."""
        parts = list(local_parts(destination))
        wanted = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in parts]
        items = create_read_items_for_chunk_list(name, self._stored(name), wanted)
        items.sort(key=lambda item: item.storage_index.offset or ())
        for index, of_piece in itertools.groupby(items, key=lambda item: item.storage_index):
            rows = [
                (item, _narrowed(parts[item.dest_index.index or 0][1], item.dest_offsets, item.lengths))
                for item in of_piece
            ]
            if self._read_rows(index, rows):
                continue
            piece = self._piece(index)
            for item, memory in rows:
                memory.copy_(_narrowed(piece, item.storage_offsets, item.lengths))

    def _read_rows(self, index: MetadataIndex, rows: Sequence[tuple[ReadItem, Tensor]]) -> bool:
        """Read rows of a piece straight into memory; `False`, with nothing read, where they have to be converted."""
        like = self.tensors[index.fqn].new_empty(self._sizes[index])
        if not all(_takes_bytes_of(like, memory) for _, memory in rows):
            return False
        with self._opened(index) as window:
            start = locate_values(cast(BinaryIO, window), like)
            if start is None:
                return False
            for item, memory in rows:
                first = sum(item.storage_offsets[:1]) * math.prod(like.shape[1:]) * like.itemsize
                self._fill(memory_of(memory), window, start + first, index)
        return True

    def _fill(self, memory: memoryview, window: _Window, at: int, index: MetadataIndex) -> None:
        window.seek(at)
        if window.readinto(memory) < len(memory):
            raise damaged_file(self._path_of(index), "one that became shorter while it was read")

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the values of a tensor in their order, a part at a time; each is good until the next is asked for."""
        like = self.tensors[name]
        if any(box.sizes[1:] != like.shape[1:] for box in self._stored(name).chunks):
            yield self.read(name)
            return
        for index in self._pieces_of(name):
            with self._opened(index) as window:
                start = locate_values(cast(BinaryIO, window), like.new_empty(self._sizes[index]))
                if start is None:
                    yield self._piece(index)
                    continue
                # Small memory that is used again stays at hand in the processor; fresh memory costs more than reading.
                nbytes = math.prod(self._sizes[index]) * like.itemsize
                memory = bytearray(min(_PART, nbytes))
                for done in range(0, nbytes, _PART):
                    part = memoryview(memory)[: nbytes - done]
                    self._fill(part, window, start + done, index)
                    yield torch.frombuffer(part, dtype=torch.uint8)

    def read_once(self) -> None:
        """Read every piece of all tensors as a load does, and keep none; a damaged one raises."""
        for index in self._sizes:
            self._piece(index)

    def bytes_of(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of the pieces of a tensor as they lie in their shards, equal for tensors of equal bits."""
        for index in self._pieces_of(name):
            with self._opened(index) as window:
                while part := window.read(_PART):
                    yield part

    def _stored(self, name: str) -> TensorStorageMetadata:
        return cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])

    def _pieces_of(self, name: str) -> list[MetadataIndex]:
        """Return which pieces of a tensor hold any values, in their order."""
        indices = (
            MetadataIndex(name, box.offsets) for box in sorted(self._stored(name).chunks, key=lambda b: b.offsets)
        )
        return [index for index in indices if index in self._sizes]

    def _path_of(self, index: MetadataIndex) -> Path:
        return self.path / str(self._places[index].relative_path)

    def _piece(self, index: MetadataIndex) -> Tensor:
        """Return a piece of a tensor, which is as the list says."""
        piece, like, sizes = self._read(index), self.tensors[index.fqn], self._sizes[index]
        if isinstance(piece, Tensor) and piece.dtype == like.dtype and piece.shape == sizes:
            return piece
        found = f"{tuple(piece.shape)} of {piece.dtype}" if isinstance(piece, Tensor) else f"a {type(piece).__name__}"
        raise CheckpointDamagedError(
            f"The shard {str(self._path_of(index))!r} is not the one that its list describes; "
            f"got {found} where {index.fqn} has {tuple(sizes)} of {like.dtype}. Load another checkpoint."
        )

    def _read(self, index: MetadataIndex) -> object:
        with self._opened(index) as window:
            return pickles.load_object(cast(BinaryIO, window), self._path_of(index))

    @contextmanager
    def _opened(self, index: MetadataIndex) -> Iterator[_Window]:
        place = self._places[index]
        try:
            descriptor = open_member(self._checkpoint, self.file(place.relative_path), links=self._links)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointDamagedError(
                f"The shard {str(self._path_of(index))!r} is not there; got nothing to read {index.fqn} "
                "from. Load another checkpoint."
            ) from error
        try:
            yield _Window(descriptor, place.offset, place.length)
        finally:
            os.close(descriptor)


def _takes_bytes_of(like: Tensor, memory: Tensor) -> bool:
    """Return whether memory holds rows of a tensor as the bytes that a file has: nothing is converted or moved."""
    plain = type(memory) in (Tensor, torch.nn.Parameter) and memory.is_cpu and memory.is_contiguous()
    lazy = memory.is_neg() or memory.is_conj()
    return plain and not lazy and memory.dtype == like.dtype and memory.shape[1:] == like.shape[1:]


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dimension, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor


class _Window(io.RawIOBase):
    """Some bytes of a file that is open under a descriptor, read as if they were a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the part."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read into memory, to the end of the part at most; return the number of bytes."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        done = 0
        # One call of the system reads 2 GiB at most.
        while count := os.preadv(self._descriptor, [view[done:]], self._offset + self._at + done):
            done += count
        self._at += done
        return done
