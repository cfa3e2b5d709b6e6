"""The pieces that plain checkpoints are written from: one file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from accel_core._records import record
from accel_core.checkpoint import json_file, pickles, tensor_file
from accel_core.checkpoint.manifest import Entry
from accel_core.checkpoint.staging import Buffers


@record(frozen=True)
class FilePart:
    """One file of a checkpoint, whose name is a path with forward slashes."""

    name: str
    kind: Literal["tensors", "object", "json", "bytes"]  # safetensors, what `torch.save` writes, JSON, as they are
    content: Any

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write the file and flush it to disk."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        writers: dict[str, Callable[..., Entry]] = {
            "tensors": tensor_file.write_tensors,
            "object": pickles.write_object,
            "json": json_file.write_json,
            "bytes": json_file.write_bytes,
        }
        return [replace(writers[self.kind](path, self.content, rank=rank), name=self.name)]

    def snapshot(self, buffers: Buffers) -> FilePart:
        """Return a copy that later training steps do not change."""
        return replace(self, content=buffers.copy(self.content, self.name))
