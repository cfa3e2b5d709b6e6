"""Checkpoints in folders that cannot be renamed, such as mount points: a complete copy inside is the commit.

The new files are gathered in a folder inside the target. Its manifest, flushed to disk, is the commit: from then on
the copy is what is loaded. Then its files are linked to their places, one by one; after a crash the next save does that
again from the start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from accel_core.checkpoint import names
from accel_core.checkpoint.digest import flush_folder
from accel_core.checkpoint.manifest import Entry, Manifest, is_complete
from accel_core.errors import CheckpointError

__all__ = ["apply", "folders", "is_needed", "pending", "staging_of"]


def is_needed(target: Path) -> bool:
    """Tell whether a folder cannot be exchanged for another: a mount point, or one in a folder that is read-only."""
    return target.is_dir() and (os.path.ismount(target) or not os.access(target.parent, os.W_OK))


def staging_of(target: Path, identity: str) -> Path:
    """Return the folder inside `target` that a save gathers its files in."""
    return names.beside(target / target.name, names.STAGING, identity)


def folders(target: Path) -> Iterator[Path]:
    """Yield what saves left inside `target`, complete or not."""
    if not target.is_dir():
        return
    for entry in sorted(os.scandir(target), key=lambda entry: entry.name):
        parsed = names.split_beside(entry.name)
        if parsed is not None and parsed[1] == target.name and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def pending(target: Path) -> Path | None:
    """Return the complete copy inside `target` that was not, or not wholly, brought to its place; else `None`."""
    complete = [
        path for path in folders(target) if path.name.startswith(names.STAGING) and is_complete(path, foreign=False)
    ]
    return max(complete, key=_written_at) if complete else None


def apply(staging: Path, target: Path) -> None:
    """Bring the files of a complete copy to their places, the manifest last, and remove parts of the checkpoint before.

    Args:
        staging: A complete folder inside `target`.
        target: The checkpoint.
    """
    manifest = Manifest.read(staging)
    if manifest is None:
        raise CheckpointError(f"The copy {str(staging)!r} has no manifest; found none. Save again.")
    listed = {entry.name for entry in manifest.entries}
    stale = {entry.name for entry in _previous(target)} - listed
    stale |= {name for name in os.listdir(target) if names.belongs_to_checkpoint(name)} - listed - {names.MANIFEST_NAME}
    for name in [*sorted(listed), names.MANIFEST_NAME]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        between = names.beside(target / name, names.GONE, names.fresh_id())
        os.link(staging / name, between)
        os.replace(between, target / name)
    for name in sorted(stale):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target / name)
    for name in os.listdir(target):
        parsed = names.split_beside(name)
        if parsed is not None and parsed[0] == names.GONE and (target / name).is_file():
            os.unlink(target / name)
    for place in sorted({(target / name).parent for name in listed} | {target}):
        flush_folder(place)


def _previous(target: Path) -> tuple[Entry, ...]:
    try:
        manifest = Manifest.read(target)
    except (CheckpointError, OSError):
        return ()
    return manifest.entries if manifest else ()


def _written_at(folder: Path) -> int:
    manifest = Manifest.read(folder)
    return manifest.written_at if manifest else 0
