"""How a folder becomes a checkpoint in one step, and what a crash leaves of a save.

A save is written into a hidden folder inside its target, `.accel-<id>`, and flushed. Renaming that folder to
`.accel-committed` is the commit: from then on it is what is loaded. Then each of its files is linked to its public
name, what the save before had and this one lacks is deleted, the manifest comes last, and the hidden folder goes. Files
that belong to no save stay as they are. docs/concepts/checkpoints.md lists what a crash can leave; tests make each row.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from accel_core.checkpoint import names
from accel_core.checkpoint.digest import flush, flush_folder
from accel_core.checkpoint.manifest import Manifest, lies_inside, owned_files, write_json
from accel_core.errors import CheckpointError, ConfigurationError

logger = logging.getLogger(__name__)


_COMMITTED = f"{names.HIDDEN}committed"
_STAGED = re.compile(rf"{re.escape(names.HIDDEN)}[a-z]{{{names.ID_LENGTH}}}")
_OWNER = f"{names.HIDDEN}owner"
"""A file that is in a staged folder for as long as no other save has cleared the folder away."""

_PLAN = f"{names.HIDDEN}plan.json"
"""Which files leave their places when a commit is put in place, and which of its own come last."""

_LINK = f"{names.HIDDEN}link"


def stage(target: Path, identity: str, *, numbered: bool = False) -> Path:
    """Recover what earlier saves left in a target, and create the hidden folder that a save is written into.

    A target with a number of its own takes one save only.
    """
    if os.path.lexists(target) and not target.is_dir():
        raise CheckpointError(
            f"Checkpoints and weights go into a folder; {str(target)!r} is not one. Move it, or pass another folder."
        )
    made = [place for place in (target, *target.parents) if not place.exists()]
    target.mkdir(parents=True, exist_ok=True)
    # A flushed folder is lost with its name in the folder above, which has to be flushed by itself:
    # https://man7.org/linux/man-pages/man2/fsync.2.html
    for folder in made:
        flush_folder(folder.parent)
    recover(target)
    if numbered and find(target) is not None:
        raise taken(target)
    staging = staging_of(target, identity)
    staging.mkdir()
    (staging / _OWNER).touch()
    return staging


def taken(target: Path) -> ConfigurationError:
    """Return the error for a checkpoint of a series in whose place there is one."""
    return ConfigurationError(
        f"The checkpoint {str(target)!r} exists already, and automatic naming would overwrite it. Load it first, which "
        "sets the number of the next one, or set project_configuration.iteration."
    )


def staging_of(target: Path, identity: str) -> Path:
    """Return the hidden folder of a save."""
    return target / f"{names.HIDDEN}{identity}"


def files_in(folder: Path, below: str = "", *, links: bool = False) -> dict[str, int]:
    """Return the files that a save wrote into a folder, and into all folders in it, with their sizes."""
    found: dict[str, int] = {}
    for entry in os.scandir(folder / below):
        if entry.is_dir(follow_symlinks=False):
            found |= files_in(folder, f"{below}{entry.name}/", links=links)
        elif not entry.name.startswith(names.HIDDEN) and (links or not entry.is_symlink()):
            found[below + entry.name] = entry.stat(follow_symlinks=False).st_size
    return found


def publish(staging: Path, target: Path, *, stale: Iterable[str], last: Iterable[str]) -> None:
    """Flush what was staged, make it the checkpoint in one step, and put it in place.

    `stale` are names whose files leave their places, and `last` those that readers look for first: their files leave
    before any other changes, and come after all others.
    """
    try:
        (staging / _OWNER).unlink()
        write_json(staging / _PLAN, {"stale": sorted(stale), "last": sorted(last)})
        _flush_tree(staging)
        os.rename(staging, target / _COMMITTED)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"The folder that a save to {str(target)!r} was written into is gone; got one that another save to the "
            "same place, or a hook, cleared away. What was there is intact. Let one run at a time save there."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"The save to {str(target)!r} could not be committed; got {error}. What was there before is intact. Remove "
            "the cause and save again."
        ) from error
    try:
        flush_folder(target)
        _place(target)
    except OSError as error:
        raise CheckpointError(
            f"The new checkpoint is complete, and load_state({str(target)!r}) reads it, but not all of its files could "
            f"be put in place; got {error}. Remove the cause and save again."
        ) from error


def standing(target: Path) -> Path:
    """Return the folder in which the newest save to a target stands: the committed one, else the target itself."""
    committed = target / _COMMITTED
    return committed if committed.is_dir() else target


def standing_file(path: Path) -> Path:
    """Return where to read a folder of weights, or a file in one: where a crash left it whole, if it did."""
    if path.is_dir():
        return standing(path)
    found = standing(path.parent) / path.name
    return found if found.exists() else path


def recover(target: Path) -> None:
    """Put a committed save in place, and delete what was only staged; what cannot be deleted is left there."""
    _place(target)
    for entry in [entry for entry in os.scandir(target) if _STAGED.fullmatch(entry.name)]:
        shutil.rmtree(entry, ignore_errors=True)


def clear(staging: Path) -> None:
    """Delete the folder of a save that is not committed; what cannot be deleted is left for the next save."""
    shutil.rmtree(staging, ignore_errors=True)


def find(target: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint that was saved to `target`; `None` if there is none."""
    folder = standing(target)
    with contextlib.suppress(CheckpointError, OSError):
        manifest = Manifest.read(folder)
        if manifest is None:
            return folder if (folder / names.random_states_name(0)).is_file() else None
        return None if manifest.damages(folder, contents=False) else folder
    return None


def numbered(directory: Path) -> list[Path]:
    """Return the numbered checkpoint folders by rising number, as accel writes them: not `checkpoint_0001`."""
    entries = [*os.scandir(directory)] if directory.is_dir() else []
    found = [
        each.name for each in entries if names.NUMBERED.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
    ]
    return [directory / name for name in sorted(found, key=lambda name: int(name.removeprefix("checkpoint_")))]


def prune(newest: Path, limit: int) -> None:
    """Delete the oldest of a numbered series, so that `limit` remain; never `newest`.

    Folders that no save wrote are not counted and not touched; of a checkpoint, what others put into it stays. What a
    save or a pruning that was killed left hidden in a folder is deleted.
    """
    kept = 1
    for target in reversed(numbered(newest.parent)):
        saved = standing(target) != target or bool(owned_files(target))
        if target == newest or not (saved or any(map(_STAGED.fullmatch, os.listdir(target)))):
            continue
        if saved and kept < max(1, limit):
            kept += 1
            continue
        try:
            _delete(target)
        except OSError as error:
            logger.warning("The checkpoint %s beyond total_limit could not be deleted: %s.", target, error)


def _place(target: Path) -> None:
    """Bring the files of a commit to their places, if there is one; doing it again after a crash does no harm."""
    committed = target / _COMMITTED
    if not committed.is_dir():
        return
    plan = json.loads((committed / _PLAN).read_bytes())
    files, last = files_in(committed, links=True), set(plan["last"])
    for name in sorted({*plan["stale"], *last}, key=lambda name: (name not in last, name)):
        if lies_inside(target, name):
            with contextlib.suppress(NotADirectoryError):
                (target / name).unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: (name in last, name)):
        _put(committed / name, target / name)
    # One flush is enough, in any order: until the hidden folder goes, after it, a crash brings all of it again.
    for folder in {(target / name).parent for name in files} | {target}:
        flush_folder(folder)
    # From the first moment of its deletion on, nothing takes it for a commit.
    gone = staging_of(target, names.fresh_id())
    os.rename(committed, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _put(staged: Path, destination: Path) -> None:
    """Put a staged file in its place in one step; its staged name stays, so that the commit stays whole."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    link = staged.with_name(_LINK)
    link.unlink(missing_ok=True)
    try:
        os.link(staged, link, follow_symlinks=False)
    except OSError:  # a filesystem without links
        shutil.copy2(staged, link, follow_symlinks=False)
        flush(link)
    os.replace(link, destination)


def _delete(target: Path) -> None:
    """Delete a checkpoint, its manifest first: a folder without one is not a checkpoint."""
    committed = standing(target)
    owned = owned_files(target) | owned_files(committed)
    (target / names.MANIFEST_NAME).unlink(missing_ok=True)
    if committed != target:
        os.rename(committed, staging_of(target, names.fresh_id()))
    recover(target)
    # What tells that it is one goes last, so that a pruning that is killed is finished by the next one. A folder of
    # Accelerate has no manifest, and loses first the file without which it counts as incomplete.
    first, last = names.random_states_name(0), names.PROGRESS_NAME
    for name in sorted(owned, key=lambda name: (name == last, name != first, name)):
        if lies_inside(target, name):
            with contextlib.suppress(NotADirectoryError):
                (target / name).unlink(missing_ok=True)
    folders = {Path(), *(parent for name in owned for parent in Path(name).parents)}
    for folder in sorted(folders, key=lambda each: -len(each.parts)):
        with contextlib.suppress(OSError):  # a folder in which others keep something stays
            (target / folder).rmdir()


def _flush_tree(folder: Path) -> None:
    """Flush the entries of a folder, and of all folders in it, to disk."""
    for place, _, _ in os.walk(folder, topdown=False):
        flush_folder(Path(place))
