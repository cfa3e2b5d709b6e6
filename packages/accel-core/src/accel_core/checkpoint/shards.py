"""Reading the weights of a model from one file, or from several through their index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_core.checkpoint import model, names
from accel_core.checkpoint.manifest import check_name, read_json
from accel_core.checkpoint.model import StoredWeights
from accel_core.errors import CheckpointDamagedError, CheckpointNotFoundError

_CHOICES = (
    names.SAFE_WEIGHTS_NAME,
    names.SAFE_WEIGHTS_INDEX_NAME,
    names.WEIGHTS_NAME,
    names.WEIGHTS_INDEX_NAME,
)


class ShardedWeights:
    """Weights in several files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        table = read_index(path)
        parts = {name: _open_file(path.parent / name) for name in sorted(set(table.values()))}
        self._where: dict[str, StoredWeights] = {}
        for name, file in table.items():
            part = self._where[name] = parts[file]
            if name not in part.tensors and name not in part.aliases:
                raise CheckpointDamagedError(
                    f"The weights file {str(path.parent / file)!r} does not fit its index; {name!r} is not in it. "
                    "Download or save the weights again."
                )
        self.tensors: Mapping[str, Any] = {
            name: part.tensors[name] for name, part in self._where.items() if name in part.tensors
        }
        self.aliases: dict[str, str] = {}
        for part in parts.values():
            others = {alias: name for alias, name in part.aliases.items() if self._where.get(alias, part) is part}
            self.aliases.update(others)
            self._where.update(dict.fromkeys(others, part))

    def read(self, name: str) -> Tensor:
        """Return one tensor in new memory on the CPU."""
        return self._where[name].read(name)

    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy one tensor into `destination`."""
        self._where[name].read_into(name, destination)


def open_weights(path: Path) -> StoredWeights:
    """Open weights for reading, in whichever form they are."""
    if path.is_dir():
        path = _choose(path)
    return ShardedWeights(path) if path.name.endswith(".json") else _open_file(path)


def read_index(path: Path) -> dict[str, str]:
    """Read an index of shards."""
    try:
        content = read_json(path.parent, path.name, links=True)
    except FileNotFoundError as error:
        raise _not_found(path) from error
    table = content.get("weight_map", content) if isinstance(content, dict) else None
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointDamagedError(
            f"The file {str(path)!r} is not an index of weights; got a {type(content).__name__} without a weight_map "
            "of names. Download or save the weights again."
        )
    for file in set(table.values()):
        check_name(file, path)
    return dict(table)


def _open_file(path: Path) -> StoredWeights:
    try:
        return model.open_weights(path.parent, path.name, links=True)  # caches of hubs hold links
    except FileNotFoundError as error:
        raise _not_found(path) from error


def _choose(folder: Path) -> Path:
    for name in _CHOICES:
        if os.path.lexists(folder / name):
            return folder / name
    found = sorted(folder.glob("*.index.json")) or sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if len(found) == 1:
        return found[0]
    raise CheckpointNotFoundError(
        f"There are no weights to choose in {str(folder)!r}; got {[path.name for path in found] or 'none'}, expected "
        f"one of {list(_CHOICES)}. Pass the file itself."
    )


def _not_found(path: Path) -> CheckpointNotFoundError:
    files = sorted(os.listdir(path.parent))[:10] if path.parent.is_dir() else ["nothing, and does not exist"]
    return CheckpointNotFoundError(
        f"The weights file {str(path)!r} is not there; its folder holds {', '.join(files) or 'nothing'}. Pass another "
        "path."
    )
