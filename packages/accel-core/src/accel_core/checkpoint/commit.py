"""Making a save the checkpoint in one step, finding the newest one, and recovering from what a crash left.

A target that does not exist is made beside its place and renamed. A target that exists is saved into without being
moved (`in_place`): renaming a hidden folder inside it is the commit. The states that a crash can leave:

| # | target | elsewhere | loading gives | next save |
|---|---|---|---|---|
| 1 | absent | – | nothing | – |
| 2 | whole | – | target | – |
| 3 | absent | beside: incomplete | nothing | deletes it |
| 4 | absent | beside: complete | what is beside | renames it |
| 5 | whole | inside: writing, complete or not | target | deletes it |
| 6 | no checkpoint | inside: writing, incomplete | nothing | deletes it |
| 7 | no checkpoint | inside: writing, complete | what is inside | commits and places it |
| 8 | any, a mixture too | inside: committed | what is inside | places it |
| 9 | whole | inside: gone, in any state | target | deletes it |
| 10 | no checkpoint, foreign files | beside: complete | what is beside | moves it inside, places it |
| 11 | damaged, or half deleted | – | an error | replaces it |

Where every machine has its own disk, all disks are prepared (5) before any is committed (8): a kill leaves either every
disk with the save before, or every disk with the new one. docs/concepts/checkpoints.md says the same for users.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from accel_core.checkpoint import deferred_delete, names
from accel_core.checkpoint.digest import flush_folder
from accel_core.checkpoint.in_place import state_journal
from accel_core.checkpoint.manifest import ALL, FoundSave, Manifest, found_save, lies_inside, owned_files
from accel_core.errors import CheckpointError, ConfigurationError

__all__ = ["STAGING", "flush_tree", "replace_folder", "sibling_path"]

logger = logging.getLogger(__name__)

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_PREFIX = "checkpoint_"
_COMMITTER = ".committer"

STAGING = ".tmp-"
GONE = ".gone-"

_LEFT = "What a save left could not be deleted: %s. The next save tries again."
_SIBLING = re.compile(rf"({re.escape(STAGING)}|{re.escape(GONE)})(.+)-[a-z]{{{names.ID_LENGTH}}}", re.DOTALL)
_LONGEST_NAME = 255 - len(GONE) - 1 - names.ID_LENGTH
"""Bytes that are left for a target's name beside it, on filesystems with names of 255 bytes."""


def make_room(
    target: Path, identity: str, committer: int, kept: Mapping[str, str], *, numbered: bool, others: bool
) -> None:
    """Recover what earlier saves left, and create the folder of a new one, which the rank `committer` completes.

    Of several saves that a crash left of a target, the one that all disks hold is `kept`, by the target's name.
    """
    for other in unrecovered(target.parent) if others else []:
        recover(other, kept.get(other.name))
    recover(target, kept.get(target.name))
    if numbered and find(target) is not None:
        raise ConfigurationError(
            f"The checkpoint {str(target)!r} exists already, and automatic naming would overwrite it. Load it "
            "first, which sets the number of the next one, or set project_configuration.iteration."
        )
    deferred_delete.wait()
    (stage(target, identity) / _COMMITTER).write_text(str(committer))


def stage(target: Path, identity: str) -> Path:
    """Create the empty folder into which a save writes; parent folders that it creates are flushed too."""
    if os.path.lexists(target):
        if not target.is_dir():
            raise CheckpointError(
                f"A checkpoint is saved into a folder; {str(target)!r} is not one. Move it, or pass another folder."
            )
        return state_journal(target).begin(identity)
    made = [place for place in target.parents if not place.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    # A flushed folder is lost with its name in the folder above, which has to be flushed by itself:
    # https://man7.org/linux/man-pages/man2/fsync.2.html
    for folder in made:
        flush_folder(folder.parent)
    staging = sibling_path(target, STAGING, identity)
    staging.mkdir()
    return staging


def staged(target: Path, identity: str) -> tuple[Path, int] | None:
    """Return the folder that `make_room` created and which rank completes it; `None` on a disk where it did not."""
    for staging in (state_journal(target).staging_of(identity), sibling_path(target, STAGING, identity)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return staging, int((staging / _COMMITTER).read_text())
    return None


def files_in(staging: Path) -> list[str]:
    """Return the files that were written into a folder and into all folders in it, but no links."""
    return list(sizes_in(staging))


def sizes_in(staging: Path, below: str = "") -> dict[str, int]:
    """Return the same with their sizes."""
    found: dict[str, int] = {}
    for entry in os.scandir(staging / below):
        if entry.is_dir(follow_symlinks=False):
            found |= sizes_in(staging, f"{below}{entry.name}/")
        elif not entry.is_symlink() and entry.name != _COMMITTER:
            found[below + entry.name] = entry.stat().st_size
    return found


def complete(staging: Path, target: Path, manifest: Manifest) -> None:
    """Finish what was staged, all of it on disk: from then on it can be published."""
    (staging / _COMMITTER).unlink(missing_ok=True)  # no part of the checkpoint
    if staging.parent != target.parent:  # inside of it, where files may have to be replaced
        state_journal(target).prepare(staging)
    # Last: a folder counts as complete from its manifest on.
    manifest.write(staging)
    flush_tree(staging)


def publish(staging: Path, target: Path) -> None:
    """Make `staging` the checkpoint in one step and bring its files to their places; an error says which one stands."""
    journal = state_journal(target)
    try:
        if staging.parent == target.parent:
            if _rename_if_absent(staging, target):
                _flush_renamed(target)
                return
            # Somebody made the folder while this save was written: it is theirs, and is saved into like any other.
            journal.prepare(staging)
            flush_tree(staging)
        committed = journal.commit(staging)
    except OSError as error:
        raise CheckpointError(
            f"The save to {str(target)!r} could not be committed; got {error}. What was there before is intact. Remove "
            "the cause and save again."
        ) from error
    try:
        journal.place(committed)
    except OSError as error:
        raise CheckpointError(
            f"The new checkpoint is complete, and load_state({str(target)!r}) reads it from {str(committed)!r}, but "
            f"not all of its files could be put in place; got {error}. Remove the cause and save again."
        ) from error
    try:
        journal.clear()
    except OSError as error:  # the checkpoint is in its place already
        logger.warning("The checkpoint %s is complete. " + _LEFT, target, error)


def undo(staging: Path, target: Path) -> None:
    """Delete the files of a save that is not committed; what cannot be deleted is left for the next save."""
    with contextlib.suppress(OSError):
        if staging.parent == target.parent:
            _discard(staging, target)
        else:
            state_journal(target).clear(staging)


def saves_of(target: Path, shares: Iterable[tuple[int, int]] = ALL) -> list[FoundSave]:
    """Return the checkpoints that this disk has for a target, best first; an empty list if there is none.

    Files in lists are looked for in the `shares` of `Manifest.listing`, of ranks that see the whole together.
    """
    journal = state_journal(target)
    committed = journal.committed(shares)
    if committed is not None:
        # The target may be a mixture now, whatever its own manifest says.
        return [committed]
    # A first save that a crash left next to its target, before it was put in place.
    staged = [path for path in _siblings(target) if path.name.startswith(STAGING)]
    siblings = [found_save(path, committed=False, foreign=False, shares=shares) for path in staged]
    found = journal.prepared(shares) + [save for save in siblings if save.whole]
    found += [found_save(target, committed=True, shares=shares)] if target.is_dir() else []
    return sorted(found, key=lambda save: (save.whole, save.committed, save.written_at), reverse=True)


def find(target: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint that was saved to `target`; `None` if there is none."""
    best = next(iter(saves_of(target)), None)
    return best.folder if best is not None and best.whole else None


def recover(target: Path, identity: str | None = None) -> None:
    """Bring a target to rest: put in place what is to be kept, delete the rest of what saves left."""
    journal = state_journal(target)
    whole = [save for save in saves_of(target) if save.whole]
    # On several disks, what this one alone prepared must not take the place of what all of them hold.
    counting = whole if identity is None else [save for save in whole if save.committed]
    best = next((save for save in whole if save.identity == identity), next(iter(counting), None))
    # Before anything is cleared: until it is in place, the folder that is adopted may be the only whole copy.
    if best is not None and best.folder != target:
        _adopt(best.folder, target)
    if os.path.lexists(journal.folder):
        journal.clear()
    for path in list(_siblings(target)):
        _discard(path, target)


def numbered(directory: Path) -> list[Path]:
    """Return the numbered checkpoint folders by rising number, with those that a crash left beside their names.

    Only numbers as accel writes them count: `checkpoint_0001` is not one of them.
    """
    found: dict[int, Path] = {}
    if directory.is_dir():
        for entry in os.scandir(directory):
            parsed = split_sibling(entry.name)
            name = parsed[1] if parsed else entry.name
            number = name.removeprefix(_PREFIX)
            canonical = number.isascii() and number.isdecimal() and number == str(int(number))
            if name.startswith(_PREFIX) and canonical and entry.is_dir(follow_symlinks=False):
                found[int(number)] = directory / name
    return [found[number] for number in sorted(found)]


def unrecovered(directory: Path) -> list[Path]:
    """Return the numbered checkpoints of a directory for which a crash left files behind."""
    entries = os.listdir(directory) if directory.is_dir() else []
    siblings = {parsed[1] for parsed in map(split_sibling, entries) if parsed}
    found = numbered(directory)
    return [target for target in found if target.name in siblings or os.path.lexists(state_journal(target).folder)]


def prune(newest: Path, limit: int) -> None:
    """Delete the oldest of a numbered series, so that `limit` remain; never `newest`, which is complete.

    Folders that no save wrote are not counted and not touched, whatever their names; of a checkpoint, what others put
    into it stays.
    """
    kept = 1
    # From the latest down, so that nothing but what stays is read before the first is deleted: saves that are killed
    # again and again would otherwise leave more than the next one gets through.
    for target in reversed(numbered(newest.parent)):
        if target == newest or not target.is_dir() or not owned_files(target, ())[0]:
            continue
        if kept < max(1, limit):
            kept += 1
            continue
        try:
            _delete(target)
        except OSError as error:
            logger.warning("The checkpoint %s beyond total_limit could not be deleted: %s.", target, error)


def flush_tree(folder: Path) -> None:
    """Flush the entries of a folder, and of all folders in it, to disk."""
    for place, _, _ in os.walk(folder, topdown=False):
        flush_folder(Path(place))


def replace_folder(source: Path, target: Path) -> None:
    """Put a flushed folder in the place of another in one step, and flush its name; what was there is deleted.

    Where the system cannot exchange folders (`renameat2`, Linux), a crash between two renames leaves no folder of that
    name.
    """
    if not os.path.lexists(target):
        os.rename(source, target)
        flush_folder(target.parent)
        return
    number = _rename_with(_RENAME_EXCHANGE, source, target)
    replaced = source
    if number in _NOT_SUPPORTED:
        replaced = sibling_path(target, GONE, names.fresh_id())
        os.rename(target, replaced)
        os.rename(source, target)
    elif number:
        raise OSError(number, os.strerror(number), str(source), None, str(target))
    flush_folder(target.parent)
    _discard(replaced, target)


def _siblings(target: Path) -> Iterator[Path]:
    """Yield every folder that saves to `target` left beside it."""
    if target.parent.is_dir():
        for entry in sorted(os.scandir(target.parent), key=lambda entry: entry.name):
            parsed = split_sibling(entry.name)
            if parsed and parsed[1] == _shortened(target.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _adopt(folder: Path, target: Path) -> None:
    """Bring a complete folder, from wherever a crash left it, to its place."""
    journal = state_journal(target)
    if folder.parent == target.parent and _rename_if_absent(folder, target):
        flush_folder(target.parent)
        return
    committed = journal.committed()
    if committed is None or folder != committed.folder:
        # A rename stays within one filesystem. `copytree` flushes nothing, and what is committed has to be on disk.
        if folder.stat().st_dev != target.stat().st_dev:
            copied = journal.begin(names.fresh_id())
            shutil.copytree(folder, copied, symlinks=True, dirs_exist_ok=True)
            os.sync()
            folder = copied
        journal.prepare(folder)
        flush_tree(folder)
        folder = journal.commit(folder)
    journal.place(folder)


def _delete(target: Path) -> None:
    """Delete a checkpoint at once; where others keep something in its folder, file by file, its list last."""
    listed, _ = owned_files(target)
    owned = {names.MANIFEST_NAME, *listed}
    folders = {parent for name in owned for parent in Path(name).parents}
    inside = [path.relative_to(target) for path in target.rglob("*")]
    if all(path.as_posix() in owned or path in folders for path in inside):
        _discard(target, target)
        return
    # A folder of Accelerate has no list, and loses first the file without which it counts as incomplete.
    in_turn = sorted(listed, key=lambda name: (name != names.random_states_name(0), name))
    files = [target / name for name in in_turn if lies_inside(target, name)]
    held = [deferred_delete.hold(path) for path in files]
    # The list last: nothing loads a folder whose list names files that are not there, so a crash in between does no
    # harm.
    for path in [*files, target / names.MANIFEST_NAME]:
        with contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)
    deferred_delete.release(held)
    # Inner ones first: only an empty folder goes.
    for folder in sorted(folders - {Path()}, key=lambda folder: -len(folder.parts)):
        # A folder in which others keep something is not empty, and stays.
        with contextlib.suppress(OSError):
            (target / folder).rmdir()


def _discard(folder: Path, target: Path) -> None:
    """Delete a folder that a save left; from the first moment on nothing takes it for a checkpoint."""
    gone = folder
    try:
        if not folder.name.startswith(GONE):
            gone = sibling_path(folder.parent / target.name, GONE, names.fresh_id())
            os.rename(folder, gone)  # its name says so, whatever becomes of its files
        if gone.is_dir() and not gone.is_symlink():
            deferred_delete.remove(gone)
        else:
            gone.unlink()
    except OSError as error:
        logger.warning(_LEFT, error)


def _flush_renamed(target: Path) -> None:
    try:
        flush_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"The new checkpoint {str(target)!r} is complete and in place, but a power loss may take it: its name "
            f"could not be flushed to disk; got {error}. Check the disk and save again."
        ) from error


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """Return the C library's renameat2, or `None` where it has none."""
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _rename_with(flag: int, source: Path, target: Path) -> int:
    """Rename with a flag of renameat2, for which Python has no name; return 0, or the number of the error."""
    renameat2 = _renameat2()
    if renameat2 is None:
        return errno.ENOSYS
    # The flags: https://man7.org/linux/man-pages/man2/rename.2.html
    done = renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flag))
    return 0 if done == 0 else ctypes.get_errno()


def _rename_if_absent(source: Path, target: Path) -> bool:
    """Rename a folder unless the target exists; return whether it was done."""
    # `os.rename` replaces an empty folder that somebody made meanwhile; RENAME_NOREPLACE does not.
    number = _rename_with(_RENAME_NOREPLACE, source, target)
    if number in (0, errno.EEXIST):
        return number == 0
    if number not in _NOT_SUPPORTED:
        raise OSError(number, os.strerror(number), str(source), None, str(target))
    if os.path.lexists(target):
        return False
    try:
        # Not in one step: an empty folder that appears in between is replaced.
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def sibling_path(target: Path, prefix: str, identity: str) -> Path:
    """Return the file or folder that stands beside `target` during a save; a very long name is shortened."""
    return target.parent / f"{prefix}{_shortened(target.name)}-{identity}"


def _shortened(name: str) -> str:
    """Return a name that fits between prefix and id: the name, or its beginning and a digest of it."""
    raw = os.fsencode(name)
    if len(raw) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return os.fsdecode(raw[: _LONGEST_NAME - len(digest) - 1]) + "~" + digest


def split_sibling(name: str) -> tuple[str, str] | None:
    """Return the prefix and the target's name of a folder that a save put beside its target; `None` for other names.

    >>> split_sibling(".tmp-ckpt-abcdefghijkl")
    ('.tmp-', 'ckpt')
    """
    parsed = _SIBLING.fullmatch(name)
    return (parsed[1], parsed[2]) if parsed else None
