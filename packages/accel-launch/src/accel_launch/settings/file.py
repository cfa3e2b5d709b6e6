"""Configuration files: YAML or JSON, read with line numbers, and written so that they can be read again."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from accel_core.errors import ConfigurationError
from accel_core.options.engines import PUBLIC, engines, require
from accel_core.options.enums import ComputeEnvironment, SageMakerDistributedType
from accel_launch.settings import document
from accel_launch.settings.devices import SEVERAL_DEVICES
from accel_launch.settings.location import default_file
from accel_launch.settings.migrate import SCHEMA, migrate
from accel_launch.settings.model import Setting
from accel_launch.settings.reading import read_text, shortened
from accel_launch.settings.resolve import resolve_file
from accel_launch.settings.resolved import Resolved
from accel_launch.settings.table import ALL, BY_KEY, BY_PATH, ENGINES

_THREADS = "num_cpu_threads_per_process"

CLUSTER_ONLY = {
    "compute_environment", "distributed_type", "tpu_name", "tpu_zone", "command_file", "commands", "schema",
    _THREADS,
}  # fmt: skip
"""Keys of a cluster's file that are not launch settings themselves."""

SAGEMAKER_ONLY = {
    "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name",
    "pytorch_version", "transformers_version", "py_version",
    "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args",
}  # fmt: skip
"""Keys that a file for SageMaker has beyond the others."""

_ENGINE_OF_TYPE = {
    **{known.word.upper(): f"use_{known.word}" for known in PUBLIC if known.files},
    **{engine.label: engine.switch for engine in engines().values() if engine.label and engine.switch},
    "XLA": "tpu",
    **dict.fromkeys(SEVERAL_DEVICES, "multi_gpu"),
    "MULTI_CPU": "cpu",
    "NO": "",
}
_ENVIRONMENTS: tuple[str, ...] = tuple(known.value for known in ComputeEnvironment)


@dataclass
class ConfigFile:
    """A configuration file."""

    path: Path
    config: dict[str, Any]
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)  # by the keys that lead there
    is_old: bool = False  # whether something had to be migrated

    def where(self, *keys: str) -> str:
        """Return file and line of a key."""
        line = self.lines.get(keys)
        return f"{self.path}:{line}" if line else str(self.path)

    def settings_of(self, written: set[str]) -> dict[str, Resolved]:
        """Return the file's settings for a launch whose command line has `written` others."""
        found: dict[str, tuple[object, str]] = {}
        for path in sorted(BY_PATH, key=lambda path: self.lines.get(path, 0)):
            setting = BY_PATH[path]
            value: Any = self.config
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is None or (setting.key == "cpu" and written & {"multi_gpu", "tpu"}):
                continue
            if setting.option is not None and value == setting.option.default == "auto":
                continue  # what the processes take where the launcher says nothing
            found[setting.key] = _text_of(setting, value, self.where(*path)), self.where(*path)
        threads = self.config.get(_THREADS)
        if threads is not None:
            found[_THREADS] = _text_of(BY_KEY[_THREADS], threads, self.where(_THREADS)), self.where(_THREADS)
        found.update(_hardware(self, written))
        if _is_for_one_process(self) and not written & _SPREADS:
            found["num_processes"] = 1, self.where("distributed_type")
        return resolve_file(BY_KEY, found)


def sections() -> set[str]:
    """Return the keys under which a file groups settings."""
    return {path[0] for path in BY_PATH if len(path) > 1}


def load(path: str | Path | None = None) -> ConfigFile | None:
    """Read a configuration file."""
    found = Path(path).expanduser() if path is not None else default_file()
    if found is None:
        return None
    if not found.is_file():
        raise ConfigurationError(
            f"The configuration file {found} does not exist. Name one that does, or write the default one with `accel "
            "config`."
        )
    return read_document(read_text(found, "The configuration file"), found)


def read_document(text: str, path: Path) -> ConfigFile:
    """Read the text of a configuration file."""
    found, lines = document.parse(text, path)
    # A section may share its object with another through an alias, and is changed where it is migrated.
    said = _with_texts(found)
    config = said | {key: _with_texts(value) for key, value in said.items() if isinstance(value, dict)}
    migrate(config)
    file = ConfigFile(path, config, lines, is_old=config != said)
    check_keys(file)
    _check_words(file)
    return file


def _with_texts(section: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in section.items()}


def check_keys(file: ConfigFile) -> None:
    """Refuse unknown keys, and plain values where settings are grouped."""
    sagemaker = file.config.get("compute_environment") == "AMAZON_SAGEMAKER"
    top = {path[0] for path in BY_PATH} | CLUSTER_ONLY | (SAGEMAKER_ONLY if sagemaker else set())
    grouped = sections()
    for key, value in file.config.items():
        if key not in top:
            if value not in (None, {}):  # Accelerate writes empty sections of engines that a run does not use
                require(key.removesuffix("_config"), file.where(key))
            elif key in _SECTIONS:
                continue
            raise _unknown(file, (key,), top)
        if key not in grouped or value is None:
            continue
        if not isinstance(value, dict):
            raise ConfigurationError(
                f"{file.where(key)}: {key} groups settings; got {shortened(value)}. Write its settings below "
                "it, indented."
            )
        known = {row.path[1] for row in (*ALL, *ENGINES) if row.path[:1] == (key,) and len(row.path) > 1}
        known |= _OTHER_KEYS.get(key, set())
        for inner in value:
            if inner not in known:
                raise _unknown(file, (key, inner), known)


_OTHER_KEYS = {"mpirun_config": {"mpirun_ccl"}}
_SECTIONS = {f"{known.word}_config" for known in PUBLIC}


def _unknown(file: ConfigFile, keys: tuple[str, ...], known: set[str]) -> ConfigurationError:
    near = get_close_matches(keys[-1], known, n=1, cutoff=0.5)
    hint = f"Did you mean `{near[0]}`?" if near else "Remove it."
    return ConfigurationError(f"{file.where(*keys)}: unknown key `{shortened('.'.join(keys))}`. {hint}")


def _check_words(file: ConfigFile) -> None:
    """Refuse words that no enumeration has."""
    place = file.config.get("compute_environment", "LOCAL_MACHINE")
    if place not in _ENVIRONMENTS:
        raise ConfigurationError(
            f"{file.where('compute_environment')}: compute_environment cannot be {shortened(place)}. Use one of "
            f"{', '.join(_ENVIRONMENTS)}."
        )
    spread = _type(file)
    allowed = (
        [known.value for known in SageMakerDistributedType] if place == _ENVIRONMENTS[1] else list(_ENGINE_OF_TYPE)
    )
    if spread not in allowed:
        near = get_close_matches(spread, allowed, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(allowed)}."
        raise ConfigurationError(
            f"{file.where('distributed_type')}: distributed_type cannot be {shortened(spread)}. {hint}"
        )


_HARDWARE = {key for key in _ENGINE_OF_TYPE.values() if key}
_SPREADS = _HARDWARE - {"cpu"} | {"nproc_per_node", "num_machines", "nnodes"}
"""Settings of the command line that start several processes, whatever `distributed_type` the file has."""
_WITH_AXES = {engine.switch for engine in engines().values() if engine.takes_axes}


def _type(file: ConfigFile) -> str:
    """Return the file's `distributed_type`; YAML reads the word NO as false."""
    kind = file.config.get("distributed_type", "NO")
    return "NO" if kind is False else str(kind)


def _is_for_one_process(file: ConfigFile) -> bool:
    """Return whether the file says NO: Accelerate starts one process then, whatever `num_processes` is."""
    return file.config.get("distributed_type") in ("NO", False) and file.config.get("num_machines", 1) == 1


def _hardware(file: ConfigFile, written: set[str]) -> dict[str, tuple[object, str]]:
    """Return the switches that the distributed type turns on, each with its place."""
    engine = _ENGINE_OF_TYPE.get(_type(file))
    found: dict[str, tuple[object, str]] = {}
    if engine and not written & _HARDWARE:
        found[engine] = True, file.where("distributed_type")
    if file.config.get("parallelism_config") and _WITH_AXES & {*found, *written}:
        found["use_parallelism_config"] = True, file.where("parallelism_config")
    return found


def _text_of(setting: Setting, value: object, where: str) -> object:
    """Return a value of the file as text for the setting's parser, or unchanged if it needs no parsing."""
    parts = value if isinstance(value, list) else [value]
    if any(isinstance(part, (dict, list)) for part in parts):
        raise ConfigurationError(
            f"{where}: {setting.key} takes one value or a list of values; got {shortened(value)}. Correct it."
        )
    words = [str(part) for part in parts]
    if setting.kind == "append":
        return words
    if setting.key == "fp8_override_linear_precision" and isinstance(value, list):
        return tuple(bool(part) for part in value)
    if value is False and "no" in setting.choices:
        return "no"
    return ",".join(words)


def write(config: Mapping[str, Any], path: Path) -> None:
    """Write a configuration file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place = path.resolve()
        temporary = place.with_name(f".{place.name}.{os.getpid()}")  # the old file stays until the new one is complete
        temporary.write_text(as_document(config, path), encoding="utf-8")
        temporary.replace(place)
    except OSError as error:
        raise ConfigurationError(
            f"The configuration file cannot be written; {path} gives: {error.strerror}. Name another with "
            "--config-file."
        ) from None


def as_document(config: Mapping[str, Any], path: Path) -> str:
    """Return a configuration as the text of a file."""
    if path.suffix == ".json":
        return json.dumps({"schema": SCHEMA, **config}, indent=2, sort_keys=True) + "\n"
    body: str = yaml.safe_dump(dict(config), sort_keys=True, default_flow_style=False)
    return f"# accel configuration, schema {SCHEMA}\n{body}"
