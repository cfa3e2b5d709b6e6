"""The configuration file of a run, where there is one."""

from importlib import import_module
from typing import TYPE_CHECKING

from accel_launch.settings.location import default_file

if TYPE_CHECKING:
    from accel_launch.settings.file import ConfigFile


def load_if_any(named: str | None) -> "ConfigFile | None":
    """Read the file that is named, or the default one; None without either."""
    if named is None and default_file() is None:
        return None
    # Only now: the reader of YAML takes longer to import than a launch without a file takes to start.
    found: ConfigFile | None = import_module("accel_launch.settings.file").load(named)
    return found
