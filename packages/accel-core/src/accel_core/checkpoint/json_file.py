"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.manifest import Entry, damaged_file, open_member


def write_json(path: Path, content: object, *, rank: int = 0) -> Entry:
    """Write JSON and flush the file to disk."""
    return write_bytes(path, json.dumps(content, indent=1, sort_keys=True).encode() + b"\n", rank=rank)


def write_bytes(path: Path, content: bytes, *, rank: int = 0) -> Entry:
    """Write bytes and flush the file to disk."""
    with HashingFile(path) as file:
        file.write(content)
    return Entry(path.name, file.size, file.digest, rank)


def read_json(folder: Path, name: str, *, links: bool = False) -> Any:
    """Read a JSON file."""
    with open(open_member(folder, name, links=links), "rb") as file:
        content = file.read()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # the latter of lists in lists, thousands deep
        raise damaged_file(folder / name, f"text that is not JSON ({error})") from error
