"""Where the checkpoints of a run lie."""

from __future__ import annotations

import os
from pathlib import Path

from accel_core.checkpoint.format import Run
from accel_core.errors import ConfigurationError, expect

__all__ = ["checkpoints_folder", "loaded_from", "saved_to"]


def checkpoints_folder(run: Run) -> Path:
    """Return the folder of automatically named checkpoints.

    Raises:
        ConfigurationError: The project has no folder.
    """
    if run.project.project_dir is None:
        raise ConfigurationError(
            "Automatic checkpoint naming needs the folder of the project; project_dir is None. "
            "Pass Accelerator(project_dir=...)."
        )
    return Path(run.project.project_dir) / "checkpoints"


def saved_to(run: Run, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the next save.

    Raises:
        ConfigurationError: No folder was given, and none follows from the project.
        UnsupportedTypeError: It is no path.
    """
    if run.project.automatic_checkpoint_naming:
        return checkpoints_folder(run) / f"checkpoint_{run.project.iteration}"
    if output_dir is None:
        raise ConfigurationError(
            "save_state needs to know where to; output_dir is None and automatic naming is off. "
            "Pass a folder, or use ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return _folder(output_dir)


def loaded_from(run: Run, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder to load, or the folder in which to look for the latest checkpoint.

    Raises:
        ConfigurationError: No folder was given, and none follows from the project.
        UnsupportedTypeError: It is no path.
    """
    if input_dir is not None:
        return _folder(input_dir)
    if not run.project.automatic_checkpoint_naming:
        raise ConfigurationError(
            "load_state needs to know where from; input_dir is None and automatic naming is off. Pass a folder."
        )
    return checkpoints_folder(run)


def _folder(given: str | os.PathLike[str]) -> Path:
    expect(
        isinstance(given, str | os.PathLike), given, "A checkpoint is a folder", "Pass its path as a text or a Path."
    )
    return Path(os.path.expanduser(given))
