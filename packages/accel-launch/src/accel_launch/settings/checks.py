"""What cannot be meant, found before anything starts."""

from pathlib import Path

from accel_core.errors import ConfigurationError
from accel_launch.settings.resolve import Settings

__all__ = ["check_script"]


def check_script(settings: Settings) -> None:
    """Refuse a script that cannot be started.

    Args:
        settings: Settings of the run.

    Raises:
        ConfigurationError: There is no such file, it is a folder, or `--module` and `--no-python` are both said.
    """
    if settings["module"] and settings["no_python"]:
        raise ConfigurationError(
            "--module and --no-python contradict one another; got both. Say --module for a Python module, "
            "--no-python for any other program."
        )
    if settings["module"] or settings["no_python"]:
        return
    path = Path(str(settings.script))
    if path.is_dir() and (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise ConfigurationError(
            f"The script is a folder without a __main__.py; got {str(path)!r}. Name the Python file in it."
        )
    if not path.exists():
        raise ConfigurationError(
            f"There is no such script; got {str(path)!r} in {Path.cwd()}. Check the path; say -m for a module."
        )
