"""What `accel launch` does: resolve the settings, check them, choose a launcher, run."""

import argparse

from accel_core.errors import ConfigurationError
from accel_launch.launchers.registry import choose
from accel_launch.settings import environ
from accel_launch.settings.checks import check_script
from accel_launch.settings.layout import layout_of
from accel_launch.settings.model import LAUNCH
from accel_launch.settings.resolve import Settings, resolve

__all__ = ["launch", "settings_from"]


def settings_from(args: argparse.Namespace) -> Settings:
    """Resolve a parsed command line.

    Args:
        args: What the command's parser returned.

    Returns:
        The settings of the run, every value with its origin.
    """
    inherited = environ.snapshot()
    return Settings(
        resolve(LAUNCH, args, environment=inherited),
        script=args.training_script,
        arguments=tuple(args.training_script_args),
        inherited=inherited,
    )


def launch(args: argparse.Namespace) -> int:
    """Start the run that a command line asks for.

    Args:
        args: What the command's parser returned.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: The command line, the environment or the configuration file cannot be meant.
        LaunchError: The processes could not be started.
    """
    settings = settings_from(args)
    if settings.script is None:
        raise ConfigurationError("No script was named. Say it after the options, as in `accel launch train.py`.")
    check_script(settings)
    layout_of(settings)
    return choose(settings).run(settings)
