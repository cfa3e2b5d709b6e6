"""Where the default configuration file is: the same place that Accelerate uses, so that its files are found."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from accel_launch.settings import environ

if TYPE_CHECKING:
    from accel_launch.settings.file import ConfigFile

__all__ = ["config_folder", "default_file", "default_json_file", "default_yaml_file", "load_if_any"]


def config_folder() -> Path:
    """Return the folder of the default configuration file: below HF_HOME, else below the user's cache folder."""
    home = environ.text("HF_HOME")
    if home:
        return Path(home).expanduser() / "accelerate"
    cache = environ.text("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "accelerate"


def default_yaml_file() -> Path:
    """Return where the default file is written."""
    return config_folder() / "default_config.yaml"


def default_json_file() -> Path:
    """Return where a default file in JSON is looked for."""
    return config_folder() / "default_config.json"


def default_file() -> Path | None:
    """Return the default file that exists, YAML before JSON, or None."""
    return next((path for path in (default_yaml_file(), default_json_file()) if path.is_file()), None)


def load_if_any(named: str | None) -> "ConfigFile | None":
    """Read the file that is named, or the default one; None without either."""
    if named is None and default_file() is None:
        return None
    # Only now: the reader of YAML takes longer to import than a launch without a file takes to start.
    found: ConfigFile | None = import_module("accel_launch.settings.file").load(named)
    return found
