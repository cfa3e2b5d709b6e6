"""`accel to-fsdp2`: a configuration file for FSDP1 becomes one for FSDP2."""

from __future__ import annotations

import argparse
import enum
import logging
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.settings.file import load, write

name = "to-fsdp2"
help = "Turn a configuration for FSDP1 into one for FSDP2."
run = "accel_parallel.to_fsdp2:to_fsdp2_command"

_logger = logging.getLogger(__name__)
_SUFFIXES = (".yaml", ".yml", ".json")


class ConversionStatus(enum.Enum):
    """Why a key has no counterpart in FSDP2."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_KEPT = (
    "fsdp_version", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params", "fsdp_state_dict_type", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params",
    "fsdp_activation_checkpointing",
)  # fmt: skip

ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{key: key for key in _KEPT},
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
}
"""FSDP2's key for each of FSDP1's, or why there is none."""

_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}

ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    "fsdp_sharding_strategy": _RESHARDS,
    "fsdp_reshard_after_forward": _RESHARDS,
}
"""What a strategy's name means for FSDP2: whether parameters are sharded again after the forward pass."""

_HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_SIZES = ("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size")


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for FSDP1 as one for FSDP2; what FSDP2 cannot be told is left out, with a warning.

    A hybrid strategy becomes the sizes of a mesh: copies on each machine of shards over its processes.

    Args:
        config: What a configuration file says. It comes back as it is where it is not about FSDP1.

    Raises:
        ConfigurationError: A hybrid strategy, and the machines do not have equal numbers of processes.
    """
    section = config.get("fsdp_config") or {}
    if not section:
        return config
    if section.get("fsdp_version", 1) == 2:
        _logger.warning("The configuration is one for FSDP2 already; got fsdp_version=2. It is left as it is.")
        return config
    converted: dict[str, Any] = {}
    mesh: dict[str, Any] = {}
    for key, value in section.items():
        name = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(name, ConversionStatus):
            gone = "was taken out of FSDP2" if name is ConversionStatus.REMOVED else "is not in FSDP2 yet"
            _logger.warning("%s %s; got %r. It is left out.", key, gone, value)
            continue
        if value in _HYBRID:
            mesh = _mesh(config, value)
        elif value == "NO_SHARD":
            _logger.warning("FSDP2 always shards; got %s=NO_SHARD. Leave FSDP out for whole copies.", key)
        words = ARGUMENT_VALUE_MAPPING.get(key)
        converted[name] = words.get(str(value), value) if words else value
    return {**config, **mesh, "fsdp_config": {**converted, "fsdp_version": 2}}


def _mesh(config: dict[str, Any], strategy: str) -> dict[str, Any]:
    """Return the section of a mesh that does what a hybrid strategy did; none for one machine, which only shards."""
    parallelism = config.get("parallelism_config") or {}
    if any(int(parallelism.get(size) or 1) > 1 for size in _SIZES):
        return {}
    machines, processes = (int(config.get(key) or 1) for key in ("num_machines", "num_processes"))
    if machines == 1:
        return {}
    if processes % machines:
        raise ConfigurationError(
            f"{strategy} shards within machines of equal size; got num_processes={processes} and "
            f"num_machines={machines}. Set num_processes to the number of processes on all machines together."
        )
    sizes = dict(zip(_SIZES, (machines, processes // machines), strict=True))
    return {"parallelism_config": {**parallelism, **sizes}}


def load_config(config_file: str) -> dict[str, Any]:
    """Return what a configuration file says.

    Raises:
        ConfigurationError: There is no such file, or it cannot be read.
    """
    found = load(config_file)
    return {} if found is None else found.config


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Turn configurations for FSDP1 into ones for FSDP2, as the command line asks: a file, or all files of a folder.

    Raises:
        ConfigurationError: There is no such file, a file cannot be read or converted, or one would be written over that
            is not to be; nothing was written then.
    """
    source, target = Path(args.config_file).expanduser(), Path(args.output_file or args.config_file).expanduser()
    places = {source: target}
    if source.is_dir():
        places = {path: target / path.name for path in sorted(source.iterdir()) if path.suffix in _SUFFIXES}
        if not places:
            raise ConfigurationError(
                f"There is no configuration to convert in {source}; got no file that ends in {' or '.join(_SUFFIXES)}. "
                "Name the file."
            )
    standing = [str(place) for place in places.values() if place.exists()]
    if standing and not args.overwrite:
        raise ConfigurationError(
            f"The converted configuration needs a place; got {', '.join(standing)}, which exists. Name another with "
            "--output-file, or say --overwrite."
        )
    # All before the first is written.
    converted = {place: convert_config_to_fsdp2(load_config(str(path))) for path, place in places.items()}
    for place, config in converted.items():
        write(config, place)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--config_file", required=True, help="The file to convert, or a folder of such files.")
    parser.add_argument("--overwrite", action="store_true", help="Write over a file that exists.")
    parser.add_argument("--output_file", help="Where to write; the file itself with --overwrite.")
