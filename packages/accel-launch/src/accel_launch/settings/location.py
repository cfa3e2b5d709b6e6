"""Where the default configuration file is: the same place that Accelerate uses, so that its files are found."""

from pathlib import Path

from accel_core.host import environ


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
    """Return the file that ACCEL_CONFIG_FILE names, else the default one that exists, YAML before JSON, or None."""
    named = environ.text("ACCEL_CONFIG_FILE")
    if named:
        return Path(named).expanduser()  # also one that is missing, which its reader refuses by name
    return next((path for path in (default_yaml_file(), default_json_file()) if path.is_file()), None)
