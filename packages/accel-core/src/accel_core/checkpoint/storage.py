"""Where checkpoints lie: the steps of a save and of a load that differ between a folder and an address in a store.

A save calls `begin`, `hooked` and `write` on every rank, `sizes` and `commit` on those that lead, `prune`, and `close`
on every rank; or `abort`, which deletes what was written, unless it may have been committed. A load calls `newest` on
the main rank where no checkpoint was named, then `open`, `fetch`, `is_replaced` and `close` on every rank.
"""

from __future__ import annotations

import os
from pathlib import Path

from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.local import LocalStorage
from accel_core.checkpoint.remote.storage import RemoteStorage
from accel_core.errors import ConfigurationError
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import World

Storage = LocalStorage | RemoteStorage
"""One checkpoint where it lies, as one rank sees it."""


def storage_of(target: Path, world: World, project: ProjectConfiguration) -> Storage:
    """Return where a checkpoint lies."""
    if isinstance(target, Address):
        return RemoteStorage(world, target)
    return LocalStorage(world, target, each_node=project.save_on_each_node)


def place_of(given: str | os.PathLike[str] | None, project: ProjectConfiguration, call: str, argument: str) -> Path:
    """Return the folder or address that a call was given, or where the series of a project lies."""
    if given is not None:
        place = names.folder_of(given)
        return place if isinstance(place, Address) else Path(os.path.realpath(place))
    if not project.automatic_checkpoint_naming:
        raise ConfigurationError(
            f"{call} was not given a folder; {argument} is None and automatic naming is off. Pass a folder, or use "
            "ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return names.folder_of(project.checkpoints_folder())
