"""Reading a folder of shards: whole tensors, or the part of them that this rank holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from accel_core.checkpoint import pickles
from accel_core.checkpoint.manifest import open_member
from accel_core.checkpoint.report import listed
from accel_core.checkpoint.tensor_file import buffer_of, lies_open
from accel_core.checkpoint.window import Window
from accel_core.errors import CheckpointDamagedError, CheckpointNotFoundError
from accel_core.mesh.tensor import local_parts
from accel_parallel.checkpoint.located import locate_tensor
from accel_parallel.checkpoint.metadata import METADATA_NAME, Box, Metadata, Place, StoredTensor, decode, overlap

__all__ = ["ShardFolder"]

_SAMPLE = 4096
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
        self.metadata: Metadata = decode(raw, self.path / METADATA_NAME)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name, such as `model.body.weight`, each with `shape` and `dtype`."""
        return self.metadata.tensors

    def file(self, name: str) -> str:
        """Return the path of a shard relative to the checkpoint."""
        return f"{self._name}/{name}" if self._name else name

    def files(self) -> list[str]:
        """Return the names of the list and of all shards, as seen from the checkpoint."""
        return sorted(self.file(name) for name in {METADATA_NAME, *self.contents()})

    def contents(self) -> dict[str, list[str]]:
        """Return the names of the values of which something lies in each shard; shards by their names here."""
        return self.metadata.contents()

    def check(self) -> dict[str, str]:
        """Return what is wrong with each shard that is missing or shorter than the list says, with what it held."""
        contents, ends = self.contents(), dict[str, int]()
        for place in self.metadata.places.values():
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
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

    def read(self, name: str) -> Tensor:
        """Return one tensor, whole, in new memory on the CPU."""
        stored = self.tensors[name]
        return self.read_part(name, Box((0,) * len(stored.shape), tuple(stored.shape)))

    @torch.no_grad()
    def read_part(self, name: str, part: Box) -> Tensor:
        """Return a part of one tensor in new memory on the CPU; only pieces that overlap it are read."""
        stored = self.tensors[name]
        if part in stored.boxes and part.numel:
            return self._piece(name, stored, part)
        made = torch.empty(part.sizes, dtype=stored.dtype, device="cpu")
        self._fill(name, part, made)
        return made

    def stream(self, name: str, box: Box) -> Iterator[Tensor]:
        """Yield the values of one piece in their order, a part at a time; each is good until the next is asked for."""
        stored = self.tensors[name]
        place = self.metadata.places[name, box.offsets]
        with self._opened(name, place) as window:
            found = locate_tensor(cast(BinaryIO, window))
            if found is not None and stored.dtype != torch.bool:
                piece, start = found
                self._check_piece(piece, name, stored, box)
                # Small memory that is used again stays at hand in the processor; fresh memory costs more than reading.
                memory = torch.empty(min(_PART, piece.nbytes), dtype=torch.uint8, device="cpu")
                left = piece.nbytes
                window.seek(start)
                while left:
                    part = memory[: min(_PART, left)]
                    self._read_bytes(window, place, part)
                    yield part
                    left -= len(part)
                return
        yield self._piece(name, stored, box)

    @torch.no_grad()
    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy one tensor into another; of a sharded one, only this rank's part is read."""
        for (offsets, sizes), memory in local_parts(destination):
            self._fill(name, Box(offsets, sizes), memory)

    def sample(self, name: str) -> bytes:
        """Return some bytes from the middle of each piece of one tensor, which are equal for equal values."""
        found = b""
        for box in sorted(self.tensors[name].boxes, key=lambda box: box.offsets):
            place = self.metadata.places[name, box.offsets]
            descriptor = self._open(name, place)
            try:
                found += os.pread(descriptor, min(_SAMPLE, place.length // 2), place.offset + place.length // 2)
            finally:
                os.close(descriptor)
        return found

    def read_object(self, name: str) -> object:
        """Return a value that is no tensor."""
        return self._read(name, None)

    def _fill(self, name: str, part: Box, destination: Tensor) -> None:
        """Copy a part of one tensor, piece by piece, into memory of its shape."""
        stored = self.tensors[name]
        for box in stored.boxes:
            common = overlap(box, part)
            if common is None:
                continue
            target = _narrowed(destination, common, part)
            if not self._read_rows(name, stored, box, common, target):
                target.copy_(_narrowed(self._piece(name, stored, box), common, box))

    def _read_rows(self, name: str, stored: StoredTensor, box: Box, part: Box, target: Tensor) -> bool:
        """Read whole rows of a piece straight into their place; return False where they have to be read otherwise."""
        fits = target.dtype == stored.dtype != torch.bool and part.sizes[1:] == box.sizes[1:]
        if not fits or not lies_open(target):
            return False
        place = self.metadata.places[name, box.offsets]
        with self._opened(name, place) as window:
            found = locate_tensor(cast(BinaryIO, window))
            if found is None:
                return False
            piece, start = found
            self._check_piece(piece, name, stored, box)
            skipped = (part.offsets[0] - box.offsets[0]) * (piece.nbytes // box.sizes[0]) if part.sizes else 0
            window.seek(start + skipped)
            self._read_bytes(window, place, target)
        return True

    def _read_bytes(self, window: Window, place: Place, target: Tensor) -> None:
        if window.readinto(buffer_of(target)) < target.nbytes:
            raise CheckpointDamagedError(
                f"The shard {str(self.path / place.file)!r} is damaged; got one that became shorter while it was read. "
                "Load another checkpoint."
            )

    def _piece(self, name: str, stored: StoredTensor, box: Box) -> Tensor:
        return self._check_piece(self._read(name, box), name, stored, box)

    def _check_piece(self, piece: object, name: str, stored: StoredTensor, box: Box) -> Tensor:
        if not isinstance(piece, Tensor) or piece.dtype != stored.dtype or tuple(piece.shape) != box.sizes:
            place = self.metadata.places[name, box.offsets]
            got = (
                f"a tensor of shape {tuple(piece.shape)} and dtype {piece.dtype}"
                if isinstance(piece, Tensor)
                else f"a {type(piece).__name__}"
            )
            raise CheckpointDamagedError(
                f"The shard {str(self.path / place.file)!r} is not the one that its list describes; got {got} where "
                f"{name} has {box.sizes} of {stored.dtype}. Load another checkpoint."
            )
        return piece

    def _read(self, name: str, box: Box | None) -> object:
        place = self.metadata.places[name, None if box is None else box.offsets]
        with self._opened(name, place) as window:
            return pickles.load_object(cast(BinaryIO, window), self.path / place.file)

    @contextmanager
    def _opened(self, name: str, place: Place) -> Iterator[Window]:
        path = self.path / place.file
        descriptor = self._open(name, place)
        try:
            size = os.fstat(descriptor).st_size
            if place.offset + place.length > size:
                raise CheckpointDamagedError(
                    f"The shard {str(path)!r} is cut off; got {size} bytes, and {name} ends at byte "
                    f"{place.offset + place.length}. Load another checkpoint."
                )
            yield Window(descriptor, place.offset, place.length)
        finally:
            os.close(descriptor)

    def _open(self, name: str, place: Place) -> int:
        try:
            return open_member(self._checkpoint, self.file(place.file), links=self._links)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointDamagedError(
                f"The shard {str(self.path / place.file)!r} is not there; got nothing to read {name} from. "
                "Load another checkpoint."
            ) from error


def _narrowed(tensor: Tensor, part: Box, of: Box) -> Tensor:
    """Return the view of a part in the memory of a part that contains it."""
    for dimension, (start, size, begin) in enumerate(zip(part.offsets, part.sizes, of.offsets, strict=True)):
        tensor = tensor.narrow(dimension, start - begin, size)
    return tensor
