"""What `accel config` does: ask or take what was said, show the file, write it."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.questions.ask import ask_all, asker_for
from accel_launch.questions.dialogue import hold_dialogue
from accel_launch.questions.question import Question
from accel_launch.settings import environ
from accel_launch.settings.config import ClusterConfig, load_config_from_file, write_basic_config
from accel_launch.settings.devices import count_gpus
from accel_launch.settings.file import as_document, load, read_document, write
from accel_launch.settings.location import default_file, default_yaml_file

__all__ = ["configure", "default_config", "update_config"]

_WRITE_IT = Question("write", "Write this file?", ("yes", "no"), "yes")


def configure(args: argparse.Namespace) -> int:
    """Write a configuration file.

    Args:
        args: Parsed command line: subcommand, config_file, set, yes.

    Returns:
        0, or 1 where the file was not wanted.

    Raises:
        ConfigurationError: An answer is not valid, or the file cannot be written.
    """
    if args.subcommand == "default":
        return default_config(args)
    if args.subcommand == "update":
        print(f"Updated {update_config(args)}.")
        return 0
    path = Path(args.config_file) if args.config_file else default_yaml_file()
    asker = asker_for(sys.stdin)
    config = _said(args.set) if args.set else hold_dialogue(asker)
    document = as_document(config, path)
    file = read_document(document, path)
    file.settings_of(set())
    print(f"\n{path}:\n\n{document}")
    if not args.yes and asker.person and ask_all((_WRITE_IT,), asker)["write"] == "no":
        print("Nothing was written.")
        return 1
    write(config, path)
    print(f"Wrote {path}. `accel launch` reads it" + ("." if not args.config_file else " with --config-file."))
    return 0


def _said(pairs: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": False}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigurationError(f"--set takes KEY=VALUE; got {pair!r}. Write it as in num_processes=2.")
        section = config
        *groups, last = key.strip().replace("-", "_").split(".")
        for group in groups:
            section = section.setdefault(group, {})
            if not isinstance(section, dict):
                raise ConfigurationError(
                    f"--set: {group} is no group of settings; got {pair!r}. Name one, or leave it out."
                )
        section[last] = _typed(value)
    return config


def _typed(text: str) -> Any:
    words = {"true": True, "false": False}
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else words.get(text.lower(), text)


def default_config(args: argparse.Namespace) -> int:
    """Write a file with the usual settings of this machine.

    Args:
        args: Parsed command line: save_location, mixed_precision.

    Returns:
        0, or 1 where the file exists already.
    """
    gpus = count_gpus(environ.snapshot())
    place = args.save_location or str(default_yaml_file())
    path = write_basic_config(args.mixed_precision, place, gpus=gpus)
    if not path:
        print(f"{place} exists and was left alone. Change it with `accel config`, or name another with --config-file.")
        return 1
    print(f"Wrote {path}.")
    return 0


def update_config(args: argparse.Namespace) -> Path:
    """Bring an existing file to today's keys and defaults, keeping what it says.

    Args:
        args: Parsed command line: config_file.

    Returns:
        The file.

    Raises:
        ConfigurationError: There is no such file.
    """
    file = load(args.config_file or default_file())
    if file is None:
        raise ConfigurationError("There is no configuration file to update. Write one with `accel config`.")
    config = load_config_from_file(file.path)
    usual = config.to_dict() if isinstance(config, ClusterConfig) else {}
    merged = {**usual, **file.config}
    merged.pop("schema", None)
    write(merged, file.path)
    for change in file.changes:
        print(f"  {change}")
    return file.path
