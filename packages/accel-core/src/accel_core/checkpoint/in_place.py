"""A save into a folder that exists: nothing in it is touched but the files that the save replaces.

The new files are gathered in a hidden folder inside the target, flushed, and committed by renaming that folder. From
then on it is what is loaded. Then each file is linked to its public place, what the save before had and this one lacks
is deleted, the manifest comes last, and the hidden folder goes. After a crash in between, the next save does that again
from the start. What others keep in the target, its mode, its group, and who works in it do not matter to any of this:
saving beside 30,000 foreign files costs what saving beside none does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import deferred_delete, names
from accel_core.checkpoint.digest import HashingFile, flush, flush_folder
from accel_core.checkpoint.manifest import ALL, FoundSave, found_save, lies_inside, owned_files
from accel_core.errors import CheckpointError

__all__ = ["Journal", "model_journal", "standing_weights", "state_journal"]

_WRITING = ".writing"
_COMMITTED = ".committed"
_GONE = ".gone"
_STALE_NAME = ".accel-stale.json"
_LINK_NAME = ".accel-link"
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
)
_NO_ATTRIBUTES = frozenset({errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENODATA, errno.EINVAL})


@record(frozen=True)
class Journal:
    """The hidden folder of one kind of save inside a target, and what saves left in it."""

    target: Path
    name: str
    # Files that come to their places after all others, because they tell readers that the others are whole.
    last: frozenset[str]
    private: frozenset[str]  # files that stay in the hidden folder
    # Files in `last` leave their places before any other is replaced: who does not know this folder finds no mixture.
    withdrawn: bool = False
    # The names that belong to what was saved before, and whether a name still refers to its file.
    owned: Callable[[Path], tuple[list[str], Callable[[str], bool]]] = owned_files

    @property
    def folder(self) -> Path:
        """The hidden folder."""
        return self.target / self.name

    def staging_of(self, identity: str) -> Path:
        """Return the folder into which a save writes."""
        return self.folder / f"{identity}{_WRITING}"

    def begin(self, identity: str) -> Path:
        """Create the folder into which a save writes."""
        try:
            # Only this user may look into it until the modes of what it replaces are known.
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise CheckpointError(
                f"A save needs the name {str(self.folder)!r} for a while; got a file there. Rename the file."
            ) from error
        staging = self.staging_of(identity)
        staging.mkdir()
        return staging

    def prepare(self, staging: Path) -> None:
        """Make sure that files can come to their places, and note which ones leave; before the manifest is written."""
        folders, files = self._staged(staging)
        self._refuse_conflicts(folders, files)
        for name in [*folders, *files]:
            with contextlib.suppress(FileNotFoundError):
                _copy_access(self.target / name, staging / name)
        owned, unchanged = self.owned(self.target)
        stale = sorted(set(owned) - set(files))
        leaving = {name: _fingerprint(self.target / name) for name in stale if unchanged(name)}
        # What a crash left prepared is prepared once more, and `HashingFile` takes new files only.
        (staging / _STALE_NAME).unlink(missing_ok=True)
        with HashingFile(staging / _STALE_NAME) as file:
            file.write(json.dumps(leaving).encode())
        # The name of the hidden folder has to be on disk before a commit is in it.
        flush_folder(self.target)

    def commit(self, staging: Path) -> Path:
        """Make the staged folder the checkpoint, in one step."""
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700)
            # As `prepare` does for the folder that `begin` made: its name has to be on disk before a commit is in it.
            flush_folder(self.target)
        # Readers that may not write read from here after a crash; modes inside are those of what is replaced.
        os.chmod(self.folder, stat.S_IMODE(os.stat(self.target).st_mode) & 0o777)
        # The id stands in the name of a folder that was written into, inside the target or beside it.
        identity = staging.stem if staging.suffix == _WRITING else staging.name.rpartition("-")[2]
        committed = self.folder / f"{identity}{_COMMITTED}"
        os.rename(staging, committed)
        try:
            flush_folder(self.folder)
        except OSError:
            # A commit that may not survive a power loss must not be followed by the loss of what it replaces.
            os.rename(committed, staging)
            raise
        return committed

    def committed(self, shares: Iterable[tuple[int, int]] = ALL) -> FoundSave | None:
        """Return the commit whose files are not all in their places yet; `None` where there is none."""
        found = (found_save(path, committed=True, foreign=False, shares=shares) for path in self._entries(_COMMITTED))
        return max((save for save in found if save.whole), key=lambda save: save.written_at, default=None)

    def prepared(self, shares: Iterable[tuple[int, int]] = ALL) -> list[FoundSave]:
        """Return what is complete and was not committed."""
        found = [found_save(path, foreign=False, shares=shares) for path in self._entries(_WRITING)]
        return [save for save in found if save.whole]

    def place(self, committed: Path) -> None:
        """Bring the files of a commit to their places; doing it again after a crash does no harm."""
        folders, files = self._staged(committed)
        self._refuse_conflicts(folders, files)
        last = [name for name in files if name in self.last]
        held: list[int | None] = []
        if self.withdrawn and last:
            for name in last:
                (self.target / name).unlink(missing_ok=True)
            flush_folder(self.target)
        for name in folders:
            _make_folder(self.target / name, committed / name)
        for name in files:
            if name not in self.last:
                _put(committed / name, self.target / name, held)
        self._remove_stale(committed, held)
        for name in last:
            _put(committed / name, self.target / name, held)
        # One flush is enough, in any order: until the hidden folder goes, after it, a crash brings all of it again.
        for place in sorted({(self.target / name).parent for name in files} | {self.target}):
            flush_folder(place)
        deferred_delete.release(held)

    def clear(self, *own: Path) -> None:
        """Delete what saves left in the hidden folder, or only the given parts, and that folder once it is empty."""
        for path in own or self._entries(_WRITING, _COMMITTED, _GONE):
            gone = path.with_suffix(_GONE)
            if path != gone:
                # From the first moment of its deletion on, nothing takes it for a commit.
                os.rename(path, gone)
            deferred_delete.remove(gone)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)

    def _entries(self, *states: str) -> list[Path]:
        found: list[str] = []
        # Another user's save that is not committed cannot be looked into.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found = sorted(os.listdir(self.folder))
        paths = [self.folder / name for name in found]
        # Ids of saves are letters alone: what has another name here is somebody else's, and stays.
        return [path for path in paths if path.stem.isalpha() and path.suffix in states]

    def _staged(self, staging: Path) -> tuple[list[str], list[str]]:
        """Return names of folders and of files below `staging` that have a public place."""
        folders, files = [], []
        for place, inner, found in os.walk(staging):
            below = Path(place).relative_to(staging)
            links = [name for name in inner if os.path.islink(os.path.join(place, name))]
            folders += [(below / name).as_posix() for name in inner if name not in links]
            files += [(below / name).as_posix() for name in [*found, *links] if name not in (_STALE_NAME, _LINK_NAME)]
        return sorted(folders), sorted(set(files) - self.private)

    def _refuse_conflicts(self, folders: list[str], files: list[str]) -> None:
        for name, kind in [*((name, "a folder") for name in folders), *((name, "a file") for name in files)]:
            path = self.target / name
            # For a folder a link is refused too: what is written through it would lie outside, where loading does not
            # follow. A file takes the place of a link.
            found = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a file"
            if os.path.lexists(path) and (found == "a folder") != (kind == "a folder"):
                raise CheckpointError(
                    f"The checkpoint needs {str(path)!r} to be {kind}; got {found}. Move it, or save into another "
                    "folder."
                )

    def _remove_stale(self, committed: Path, held: list[int | None]) -> None:
        for name, fingerprint in json.loads((committed / _STALE_NAME).read_bytes()).items():
            path = self.target / name
            # Whoever wrote under that name since the commit keeps what they wrote.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if lies_inside(self.target, name) and _fingerprint(path) == tuple(fingerprint):
                    held.append(deferred_delete.hold(path))
                    os.unlink(path)


def state_journal(target: Path) -> Journal:
    """Return the journal of `save_state` in a folder."""
    return Journal(target, names.JOURNAL_NAME, frozenset({names.MANIFEST_NAME}), frozenset())


def model_journal(target: Path, safe: bool = True) -> Journal:
    """Return the journal of `save_model` in a folder; an index of shards tells readers that they are complete.

    Weights in the other format than that of the save are not its concern.
    """
    indexes = frozenset({names.SAFE_WEIGHTS_INDEX_NAME, names.WEIGHTS_INDEX_NAME})
    suffix = ".safetensors" if safe else ".bin"

    def owned(folder: Path) -> tuple[list[str], Callable[[str], bool]]:
        shards = [name for name in os.listdir(folder) if names.is_shard(name)]
        found = [name for name in shards if name.removesuffix(".index.json").endswith(suffix)]
        return found, lambda name: not (folder / name).is_dir()

    private = frozenset({names.MANIFEST_NAME})
    return Journal(target, names.MODEL_JOURNAL_NAME, indexes, private, withdrawn=True, owned=owned)


def standing_weights(path: Path) -> Path:
    """Return where to read what `save_model` wrote: where a crash left it whole, before its files are all in place."""
    # A path of any length or spelling may be asked for, and most have no folder of a save beside them.
    folder = path if os.path.isdir(path) else path.parent
    journal = model_journal(folder)
    committed = journal.committed() if os.path.isdir(journal.folder) else None
    if committed is None or path == folder:
        return path if committed is None else committed.folder
    standing = committed.folder / path.name
    return standing if os.path.exists(standing) else path


def _put(staged: Path, destination: Path, held: list[int | None]) -> None:
    """Put a staged file in its place in one step; its staged name stays."""
    with contextlib.suppress(FileNotFoundError):
        # After a crash it may have been put in place already.
        if os.path.samestat(os.lstat(staged), os.lstat(destination)):
            return
    # The link is made beside its source: some filesystems link within one folder only, and a crash leaves it where
    # everything is deleted.
    link = staged.parent / _LINK_NAME
    link.unlink(missing_ok=True)
    held.append(deferred_delete.hold(destination))
    try:
        os.link(staged, link, follow_symlinks=False)
        os.rename(link, destination)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _copy(staged, destination)


def _copy(staged: Path, destination: Path) -> None:
    """Put a copy in a place that a link cannot come to."""
    between = destination.parent / _LINK_NAME
    between.unlink(missing_ok=True)
    try:
        shutil.copy2(staged, between, follow_symlinks=False)
        if not between.is_symlink():
            # A copy has content of its own to flush, and the staged file is deleted when all are in place.
            flush(between)
        os.rename(between, destination)
    finally:
        between.unlink(missing_ok=True)


def _make_folder(folder: Path, staged: Path) -> None:
    try:
        folder.mkdir()
    except FileExistsError:
        return
    # By itself: the umask takes bits from the mode that a folder is made with.
    os.chmod(folder, stat.S_IMODE(os.stat(staged).st_mode))
    flush_folder(folder.parent)


def _copy_access(source: Path, destination: Path) -> None:
    """Let the same people read `destination` as `source`: owner, group, mode and extended attributes."""
    old, new = os.lstat(source), os.lstat(destination)
    if stat.S_ISLNK(old.st_mode) or stat.S_ISLNK(new.st_mode):
        return
    mode = stat.S_IMODE(old.st_mode)
    # Before the mode, of which chown may clear bits; only root may give a file to another user:
    # https://man7.org/linux/man-pages/man2/chown.2.html
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        try:
            os.chown(destination, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
        except OSError:
            # A group that this user cannot give it to must not be replaced by one that could not read it before.
            mode &= ~0o070
    if mode != stat.S_IMODE(os.lstat(destination).st_mode):
        os.chmod(destination, mode)
    for name in os.listxattr(source) if hasattr(os, "listxattr") else []:
        _copy_attribute(source, destination, name)


def _copy_attribute(source: Path, destination: Path, name: str) -> None:
    try:
        os.setxattr(destination, name, os.getxattr(source, name))
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise


def _fingerprint(path: Path) -> tuple[int, int, int]:
    """Return inode, size and time of the last change of a file's content."""
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
