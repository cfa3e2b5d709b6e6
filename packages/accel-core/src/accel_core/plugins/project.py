"""Where a run keeps its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from accel_core._records import record
from accel_core.errors import ConfigurationError, expect_flags


@record
class ProjectConfiguration:
    """Folders of a run, and how its checkpoints are named and kept.

    Args:
        project_dir: Folder for everything that the run writes, or an address in an object store for its checkpoints.
        logging_dir: Folder for trackers that write files; `project_dir` where `None` and that is a folder.
        automatic_checkpoint_naming: Number the checkpoints under `project_dir/checkpoints`.
        total_limit: Number of checkpoints to keep; all where `None`.
        iteration: Number of the next checkpoint.
        save_on_each_node: Save on the main process of every machine instead of on the first machine only.

    Raises:
        ConfigurationError: `total_limit` is not a number, or below 0.
        UnsupportedTypeError: A text stands where true or false belongs.

    Examples:
        >>> project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
        >>> project.logging_dir
        'run'
    """

    meets: ClassVar[Callable[[], bool]] = staticmethod(lambda: True)
    """Whether all ranks meet in `save_state` also where each holds all that is saved; the drop-in changes it, as
    scripts written for Accelerate may save on the main rank alone."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        """Fill the logging folder."""
        limit = self.total_limit
        if limit is not None and not (hasattr(limit, "__index__") and limit >= 0):
            raise ConfigurationError(
                f"total_limit must be a non-negative integer; got total_limit={limit!r}. Write None to keep all."
            )
        expect_flags(type(self), vars(self))
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project's folder, and the logging folder where none is set yet.

        Args:
            project_dir: The folder, or `None` for none.
        """
        self.project_dir = project_dir
        if self.logging_dir is None and "://" not in (project_dir or ""):  # trackers write to disks alone
            self.logging_dir = project_dir

    def checkpoints_folder(self) -> Path:
        """Return the folder of automatically named checkpoints.

        Raises:
            ConfigurationError: The project has no folder.
        """
        if self.project_dir is None:
            raise ConfigurationError(
                "Automatic checkpoint naming needs the folder of the project; project_dir is None. "
                "Pass Accelerator(project_dir=...)."
            )
        return Path(self.project_dir) / "checkpoints"
