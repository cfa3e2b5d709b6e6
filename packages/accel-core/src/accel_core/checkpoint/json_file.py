"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.manifest import Entry, open_member
from accel_core.errors import CheckpointDamagedError

__all__ = ["read_json", "write_json"]

_LONGEST = 256 << 20


def write_json(path: Path, content: object, *, rank: int = 0) -> Entry:
    """Write JSON and flush the file to disk."""
    with HashingFile(path) as file:
        file.write(json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")
    return Entry(path.name, file.size, file.digest, rank)


def read_json(folder: Path, name: str, *, links: bool = False) -> Any:
    """Read a JSON file of at most 256 MiB.

    Raises:
        CheckpointDamagedError: It is no JSON.
        UnsafeCheckpointError: It is no regular file or leads out of the folder.
        FileNotFoundError: There is no such file.
    """
    with open(open_member(folder, name, links=links), "rb") as file:
        content = file.read(_LONGEST + 1)
    try:
        if len(content) > _LONGEST:
            raise ValueError(f"more than {_LONGEST} bytes")
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"The checkpoint file {str(folder / name)!r} is damaged or in another format; it is not JSON ({error}). "
            "Load another checkpoint."
        ) from error
