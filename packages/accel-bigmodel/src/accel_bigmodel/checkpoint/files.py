"""Which files the weights of a model are in, however a folder or an index names them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from accel_core.checkpoint.commit import standing_file
from accel_core.checkpoint.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel_core.checkpoint.shards import read_index
from accel_core.errors import CheckpointMismatchError, CheckpointNotFoundError

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def find_files(checkpoint: str | os.PathLike[str]) -> tuple[list[str], dict[str, str] | None]:
    """List the files that a checkpoint is made of.

    Raises:
        CheckpointNotFoundError: When the checkpoint or a shard that its index names is missing.
        CheckpointMismatchError: When a folder holds several indices, or none and several weights files.
        UnsafeCheckpointError: When the index names a file outside its folder.
        CheckpointDamagedError: When the index cannot be read.
    """
    path = standing_file(Path(checkpoint))
    if not os.path.exists(path):
        raise CheckpointNotFoundError(
            f"No checkpoint at {str(path)!r}; nothing is there. Check the path, or fetch the files again."
        )
    if path.is_dir():
        return _find_in_folder(path)
    if path.suffix == ".json":
        return _read_index(path)
    return _parts_of(path), None


def holds_gguf(checkpoint: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is a GGUF file, or a folder whose weights are in some."""
    path = Path(checkpoint)
    return path.suffix == ".gguf" or (
        path.is_dir() and any(path.glob("*.gguf")) and find_files(path)[0][0].endswith(".gguf")
    )


def _parts_of(path: Path) -> list[str]:
    """List the parts of a GGUF file that was split; other files have one."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [str(path)]
    parts = [path.with_name(f"{split[1]}-{number:05}-of-{split[3]}.gguf") for number in range(1, int(split[3]) + 1)]
    for part in parts:
        if not part.exists():
            raise CheckpointNotFoundError(
                f"A part of a GGUF file that was split is missing; got nothing at {str(part)!r}. Fetch it again."
            )
    return [str(part) for part in parts or (path,)]


def _find_in_folder(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    found = sorted(folder.iterdir())
    single = [file for file in found if file.name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME)]
    indices = [file for file in found if file.name.endswith(".index.json")]
    if len(indices) == 1:
        return _read_index(indices[0])
    safe = [file for file in indices if ".safetensors." in file.name]
    if len(safe) == 1 and len(indices) == 2:  # the same weights in both forms
        return _read_index(safe[0])
    if indices:
        raise CheckpointMismatchError(
            f"{str(folder)!r} containing more than one `.index.json` file, delete the irrelevant ones; got "
            f"{', '.join(file.name for file in indices)}. Name the index itself as the checkpoint."
        )
    if not single:
        single = [file for file in found if file.suffix == ".safetensors"]
    if not single:
        # One of each: a folder may have several files, and each of them several parts.
        single = list({_SPLIT.sub(r"\1-\3", file.name): file for file in found if file.suffix == ".gguf"}.values())
    if not single:
        raise CheckpointNotFoundError(
            f"{str(folder)!r} is not a folder containing a `.index.json` file or a {WEIGHTS_NAME} or a "
            f"{SAFE_WEIGHTS_NAME} file; got {len(found)} other entries. Name the weights file itself."
        )
    safe = [file for file in single if file.suffix in (".safetensors", ".gguf")]
    if len(safe) > 1:
        raise CheckpointMismatchError(
            f"The folder {str(folder)!r} holds several weights files and no index; got "
            f"{', '.join(file.name for file in safe)}. Name one of them, or add an index."
        )
    return _parts_of((safe or single)[0]), None


def _read_index(path: Path) -> tuple[list[str], dict[str, str]]:
    files: dict[str, str] = {}
    for name in set((table := read_index(path)).values()):
        files[name] = str(path.parent / name)
        if not os.path.exists(files[name]):
            raise CheckpointNotFoundError(
                f"A shard of a checkpoint is missing; got nothing at {files[name]!r}, which {str(path)!r} names. "
                "Fetch it again."
            )
    return sorted(files.values()), {name: files[file] for name, file in table.items()}
