"""What `accel launch` does: resolve the settings, check them, choose a launcher, run."""

import argparse
import sys
from importlib import import_module

from accel_core.errors import ConfigurationError
from accel_core.host import environ
from accel_launch.launchers.registry import choose
from accel_launch.settings.checks import check_installed, check_script, check_settings
from accel_launch.settings.cluster import recognise
from accel_launch.settings.configured import load_if_any
from accel_launch.settings.resolve import Settings, resolve, written_in
from accel_launch.settings.slips import slips
from accel_launch.settings.table import ALL
from accel_launch.terminal import colors_wanted, paint, say

_PREVIEW = "accel_launch.commands.preview"


def settings_from(args: argparse.Namespace) -> Settings:
    """Resolve a parsed command line."""
    inherited = environ.snapshot()
    file = load_if_any(args.config_file or None)
    in_file = {} if file is None else file.settings_of(written_in(ALL, args))
    return Settings(
        resolve(ALL, args, environment=inherited, cluster=recognise(inherited), file=in_file),
        script=args.training_script,
        arguments=tuple(args.training_script_args),
        inherited=inherited,
        file=None if file is None else str(file.path),
        file_order=tuple(in_file),
        config={} if file is None else file.config,
    )


def launch(args: argparse.Namespace) -> int:
    """Start the run that a command line asks for.

    Raises:
        ConfigurationError: The command line, the environment or the configuration file is not valid.
        LaunchError: The processes could not be started.
    """
    settings = settings_from(args)
    if settings["explain"]:
        import_module(_PREVIEW).print_explanation(settings, as_json=settings["json"], every=settings["all"])
        return 0
    if settings.script is None:
        raise ConfigurationError("No script was given. Name it after the options, as in `accel launch train.py`.")
    check_script(settings)
    check_settings(settings)
    for warning in slips(settings):
        say(f"{paint('accel launch:', 'warning', colors_wanted(sys.stderr))} {warning}")
    launcher = choose(settings)
    if settings["dry_run"]:
        import_module(_PREVIEW).print_plan(settings, launcher, as_json=settings["json"])
        return 0
    check_installed(settings)
    return launcher.run(settings)
