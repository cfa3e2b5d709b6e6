"""What `accel config` does: ask, or take what was given; then show the file and write it."""

import argparse
import itertools
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.questions.ask import ask_all, asker_for
from accel_launch.questions.dialogue import hold_dialogue
from accel_launch.questions.question import Question
from accel_launch.settings.config import ClusterConfig, basic_config, load_config_from_file
from accel_launch.settings.document import parse
from accel_launch.settings.file import ConfigFile, as_document, check_keys, load, read_document, write
from accel_launch.settings.layout import layout_of
from accel_launch.settings.location import default_file, default_yaml_file
from accel_launch.settings.reading import read_text
from accel_launch.settings.resolve import resolve
from accel_launch.settings.table import ALL

_WRITE_IT = Question("write", "Write this file?", ("yes", "no"), "yes")


def configure(args: argparse.Namespace) -> int:
    """Write a configuration file.

    Raises:
        ConfigurationError: An answer is not valid, or the file cannot be written.
    """
    if args.subcommand == "default":
        return default_config(args)
    if args.subcommand in ("show", "get", "path"):
        return _look(args)
    if args.subcommand == "update":
        print(f"Updated {update_config(args)}.")
        return 0
    path = Path(args.config_file).expanduser() if args.config_file else default_yaml_file()
    asker = asker_for(sys.stdin)
    config = _merged(args.set, path) if args.set else hold_dialogue(asker)
    document = as_document(config, path)
    read_document(document, path).settings_of(set())
    print(f"\n{path}:\n\n{document}")
    if not args.yes and asker.person and ask_all((_WRITE_IT,), asker)["write"] == "no":
        print("Nothing was written.")
        return 1
    _replace(config, path)
    print(f"Wrote {path}. `accel launch` reads it" + ("." if path == default_file() else " with --config-file."))
    return 0


def _look(args: argparse.Namespace) -> int:
    """Print the file that a launch reads, one value of it, or its place."""
    file = load(args.config_file or None)
    if file is None:
        raise ConfigurationError("There is no default configuration file. Write one with `accel config`.")
    values = _flat(file.config)
    if args.subcommand == "get" and args.key not in values:
        raise ConfigurationError(f"{file.path} has no {args.key}; got {', '.join(sorted(values))}. Name one of these.")
    shown = {"path": str(file.path), "get": values.get(getattr(args, "key", ""))}
    print(shown.get(args.subcommand, f"# {file.path}\n{as_document(file.config, file.path)}"))
    return 0


def _merged(pairs: list[str], path: Path) -> dict[str, Any]:
    """Return the existing file, or the usual keys, with the values of `--set`."""
    values = _parsed(pairs)
    found = ConfigFile(Path("--set"), values)
    check_keys(found)
    found.settings_of(set())
    usual = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False}
    file = load(path) if path.is_file() else None
    config = usual if file is None else {key: value for key, value in file.config.items() if key != "schema"}
    if "num_processes" in values and config.get("distributed_type") in ("NO", False):
        del config["distributed_type"]  # one process, whatever the number
    for key, value in values.items():
        group = config.get(key)
        config[key] = {**group, **value} if isinstance(group, dict) and isinstance(value, dict) else value
    return config


def _parsed(pairs: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
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
                    f"--set: {group} is not a group of settings; got {pair!r}. Name one, or leave it out."
                )
        section[last] = _typed(value)
    return config


def _replace(config: Mapping[str, Any], path: Path) -> None:
    """Write a file; keep a copy of the one it replaces, and say what changed."""
    if not path.is_file():
        write(config, path)
        return
    changes = list(_changes(path, config))
    if path.read_bytes() == as_document(config, path).encode():
        print("  Nothing changes.")
        return
    backup = next(place for place in _backups(path) if not place.exists())
    shutil.copyfile(path, backup)
    write(config, path)
    print("\n".join(f"  {change}" for change in changes) or "  Nothing changes but the form.")
    print(f"The file that was there is kept as {backup}.")


def _backups(path: Path) -> Iterator[Path]:
    """Yield the names for copies of a file that is replaced; a copy itself is never replaced."""
    yield path.with_name(f"{path.name}.bak")
    yield from (path.with_name(f"{path.name}.bak{number}") for number in itertools.count(1))


def _changes(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """List the differences between a file and its replacement, key by key."""
    try:
        before = _flat(parse(read_text(path, "The configuration file"), path)[0])
    except ConfigurationError as error:
        yield f"It could not be read: {error}"
        return
    after = _flat(config)
    for key in sorted((before.keys() | after.keys()) - {"schema"}):
        if before.get(key) != after.get(key):
            yield f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"


def _flat(config: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found.update(_flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value})
    return found


def _typed(text: str) -> object:
    words = {"true": True, "false": False}
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else words.get(text.lower(), text)


def default_config(args: argparse.Namespace) -> int:
    """Write a file with the usual settings of this machine."""
    place = args.save_location or getattr(args, "config_file", None) or default_yaml_file()
    path = Path(place).expanduser()
    config = basic_config(args.mixed_precision).to_dict()
    if path.exists() and not getattr(args, "yes", False):
        print(f"{path} exists and was left alone. --yes replaces it, and keeps it as {path.name}.bak:")
        print("\n".join(f"  {change}" for change in _changes(path, config)) or "  Nothing would change.")
        return 1
    _replace(config, path)
    print(f"Wrote {path}.")
    return 0


def update_config(args: argparse.Namespace) -> Path:
    """Update an existing file to the current keys and defaults, keeping its values."""
    file = load(args.config_file or default_file())
    if file is None:
        raise ConfigurationError("There is no configuration file to update. Write one with `accel config`.")
    layout_of(resolve(ALL, args, environment={}, file=file.settings_of(set())), {})
    config = load_config_from_file(file.path)
    usual = config.to_dict() if isinstance(config, ClusterConfig) else {}
    usual.pop("distributed_type", None)  # a file without it starts as many processes as it says
    merged = {**usual, **file.config}
    merged.pop("schema", None)
    if merged.get("num_processes") == -1:  # the default of the class
        del merged["num_processes"]
    _replace(merged, file.path)
    return file.path
