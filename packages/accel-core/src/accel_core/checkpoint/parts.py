"""The pieces that plain checkpoints are written from: one file each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from accel_core._records import record
from accel_core.checkpoint import json_file, pickles, tensor_file
from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.manifest import Entry
from accel_core.checkpoint.staging import Buffers

__all__ = ["BytesPart", "FilePart"]


@record(frozen=True)
class BytesPart:
    """One small file of a checkpoint whose bytes are known."""

    name: str
    content: bytes
    concurrent: bool = True  # it may be written in a thread, beside others

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write the file and flush it to disk."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashingFile(path) as file:
            file.write(self.content)
        return [Entry(self.name, file.size, file.digest, rank)]

    def snapshot(self, buffers: Buffers) -> BytesPart:
        """Return this part itself: nothing changes it."""
        return self


@record(frozen=True)
class FilePart:
    """One file of a checkpoint."""

    name: str
    kind: Literal["tensors", "object", "json"]  # how the content is written: safetensors, `torch.save` or JSON
    content: Any
    concurrent: bool = True  # it may be written in a thread, beside others

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write the file and flush it to disk."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.kind == "tensors":
            entry = tensor_file.write_tensors(path, self.content, rank=rank)
        elif self.kind == "json":
            entry = json_file.write_json(path, self.content, rank=rank)
        else:
            entry = pickles.write_object(path, self.content, rank=rank)
        return [replace(entry, name=self.name)]

    def snapshot(self, buffers: Buffers) -> FilePart:
        """Return a copy that later training steps do not change."""
        return replace(self, content=buffers.copy(self.content, self.name))
