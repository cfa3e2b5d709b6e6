"""Putting a finished folder in place in one step, and settling what a crash left behind.

The states that a crash can leave, and what becomes of each, are the table in docs/concepts/checkpoints.md.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from accel_core.checkpoint import disposal, names, redo
from accel_core.checkpoint.digest import flush_folder
from accel_core.checkpoint.manifest import Manifest, is_complete
from accel_core.errors import CheckpointError

__all__ = [
    "discard",
    "find",
    "latest",
    "leftovers",
    "numbered",
    "prune",
    "put_in_place",
    "settle",
    "stage",
    "staging_of",
    "take_over_foreign_files",
]

logger = logging.getLogger(__name__)

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def stage(target: Path, identity: str) -> Path:
    """Make the empty folder that a save to `target` writes into; folders that are made above it are flushed too."""
    made = []
    place = target.parent
    while not place.exists():
        made.append(place)
        place = place.parent
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in made:
        flush_folder(folder.parent)
    staging = staging_of(target, identity)
    staging.mkdir()
    return staging


def staging_of(target: Path, identity: str) -> Path:
    """Return the folder that a save to `target` writes into: beside it, or inside where it cannot be exchanged."""
    if redo.is_needed(target):
        return redo.staging_of(target, identity)
    return names.beside(target, names.STAGING, identity)


def put_in_place(staging: Path, target: Path, identity: str) -> None:
    """Make `staging` the checkpoint `target` in one step, and delete what was there.

    Args:
        staging: A complete folder beside the target, flushed to disk.
        target: Where the checkpoint belongs.
        identity: Id of this save.

    Raises:
        CheckpointError: The target is something that cannot be replaced.
    """
    if staging.parent == target:
        redo.apply(staging, target)
        _discard_previous(staging, target / target.name, target)
        return
    try:
        os.rename(staging, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise CheckpointError(
                f"The checkpoint {str(target)!r} cannot be put in place; found {error.strerror} when renaming "
                f"{str(staging)!r}. The target must be a folder."
            ) from error
    else:
        flush_folder(target.parent)
        return
    previous = staging
    if not _exchange(staging, target):
        previous = names.beside(target, names.OLD, identity)
        os.rename(target, previous)
        try:
            os.rename(staging, target)
        except OSError:
            os.rename(previous, target)
            raise
    flush_folder(target.parent)
    _discard_previous(previous, target, target)


def _discard_previous(folder: Path, name: Path, target: Path) -> None:
    """Delete what a save does not need any more; the checkpoint is complete already, so a failure is no error."""
    try:
        discard(folder, name)
    except OSError as error:
        logger.warning(
            "The checkpoint %s is complete, but what was there before could not be deleted: %s. "
            "The next save to the same folder tries again.",
            target,
            error,
        )


def discard(folder: Path, target: Path) -> None:
    """Delete a folder; from the first moment on nothing takes it for a checkpoint.

    The space of large files is freed a little later: `disposal.wait` waits for that.

    Args:
        folder: What to delete.
        target: The checkpoint beside which it stands, or `folder` itself.
    """
    gone = folder
    parsed = names.split_beside(folder.name)
    if parsed is None or parsed[0] != names.GONE:
        gone = names.beside(target, names.GONE, names.fresh_id())
        os.rename(folder, gone)
        if parsed is None:
            flush_folder(gone.parent)
    disposal.remove(gone)


def leftovers(target: Path) -> Iterator[tuple[str, Path]]:
    """Yield prefix and path of every folder that saves to `target` left beside it."""
    if not target.parent.is_dir():
        return
    for entry in sorted(os.scandir(target.parent), key=lambda entry: entry.name):
        parsed = names.split_beside(entry.name)
        if parsed is not None and parsed[1] == target.name and entry.is_dir(follow_symlinks=False):
            yield parsed[0], Path(entry.path)


def find(target: Path) -> Path | None:
    """Return the folder that holds the newest complete checkpoint saved to `target`; `None` if there is none."""
    inside = redo.pending(target)
    if inside is not None:
        return inside
    if is_complete(target):
        return target
    candidates = [
        (prefix == names.STAGING, _written_at(path), path)
        for prefix, path in leftovers(target)
        if prefix != names.GONE and is_complete(path, foreign=prefix == names.OLD)
    ]
    return max(candidates)[2] if candidates else None


def settle(target: Path) -> None:
    """Bring `target` and what stands beside it to rest: recover what is complete, delete the rest."""
    best = find(target)
    if best is not None and best.parent == target:
        redo.apply(best, target)
    elif best is not None and best != target:
        if os.path.lexists(target):
            take_over_foreign_files(target, best)
            discard(target, target)
        os.rename(best, target)
        flush_folder(target.parent)
    for path in list(redo.folders(target)):
        discard(path, target / target.name)
    for _, path in list(leftovers(target)):
        discard(path, target)


def latest(directory: Path, prefix: str = "checkpoint_") -> Path | None:
    """Return the latest complete checkpoint in a directory, or `None`.

    Args:
        directory: Where checkpoints named `prefix` + number lie.
        prefix: What stands before the number.

    Returns:
        The folder; it may be one that a crash left under another name beside its target.
    """
    for target in reversed(numbered(directory, prefix)):
        found = find(target)
        if found is not None:
            return found
    return None


def numbered(directory: Path, prefix: str = "checkpoint_") -> list[Path]:
    """Return the checkpoints in a directory by rising number, also those that stand only under a name beside theirs."""
    found: dict[int, Path] = {}
    if directory.is_dir():
        for entry in os.scandir(directory):
            parsed = names.split_beside(entry.name)
            name = parsed[1] if parsed else entry.name
            number = name[len(prefix) :]
            if name.startswith(prefix) and number.isdecimal() and entry.is_dir(follow_symlinks=False):
                found[int(number)] = directory / name
    return [found[number] for number in sorted(found)]


def prune(newest: Path, limit: int, prefix: str = "checkpoint_") -> None:
    """Delete the oldest of a numbered series, so that `limit` remain; never `newest`, which is complete.

    Args:
        newest: The checkpoint that was just put in place.
        limit: How many to keep, at least one.
        prefix: What stands before the number.
    """
    others = [target for target in numbered(newest.parent, prefix) if target != newest and target.is_dir()]
    for target in others[: max(0, len(others) + 1 - max(1, limit))]:
        discard(target, target)


def take_over_foreign_files(target: Path, staging: Path) -> None:
    """Hard-link into `staging` whatever lies in `target` and is not part of a checkpoint.

    Links stay links; folders are made anew. A file that the new checkpoint holds too is left out.
    """
    if not target.is_dir():
        return
    listed = _listed(target)
    _take_over(target, staging, Path(), listed)


def _take_over(source: Path, destination: Path, below: Path, listed: frozenset[str]) -> None:
    for entry in os.scandir(source / below):
        inner = below / entry.name
        copy = destination / inner
        if entry.is_dir(follow_symlinks=False):
            made = not copy.is_dir()
            copy.mkdir(exist_ok=True)
            _take_over(source, destination, inner, listed)
            if made and not os.listdir(copy) and os.listdir(source / inner):
                copy.rmdir()
            continue
        ours = inner.as_posix() in listed or (below == Path() and names.belongs_to_checkpoint(entry.name))
        if not ours and not os.path.lexists(copy):
            _link(source / inner, copy)


def _link(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, *_NO_EXCHANGE):
            raise
        shutil.copy2(source, copy, follow_symlinks=False)


def _listed(target: Path) -> frozenset[str]:
    """Return the names that the manifest of the previous checkpoint lists; none where it cannot be read."""
    try:
        manifest = Manifest.read(target)
    except (CheckpointError, OSError):
        return frozenset()
    return frozenset(entry.name for entry in manifest.entries) if manifest else frozenset()


def _written_at(folder: Path) -> int:
    manifest = Manifest.read(folder)
    return manifest.written_at if manifest else 0


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """Return the C library's renameat2, or `None` where it has none."""
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; return whether the system can."""
    renameat2 = _renameat2()
    if renameat2 is None:
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
