"""`accelerate to-fsdp2`: a configuration file for FSDP1 becomes one for FSDP2."""

from __future__ import annotations

import argparse
import enum
import logging
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.cli import build_parser
from accel_launch.command import Command
from accel_launch.settings.file import load, write

__all__ = [
    "ARGUMENT_KEY_MAPPING",
    "ARGUMENT_VALUE_MAPPING",
    "TO_FSDP2",
    "ConversionStatus",
    "convert_config_to_fsdp2",
    "load_config",
    "to_fsdp2_command",
    "to_fsdp2_command_parser",
]

_logger = logging.getLogger(__name__)


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

_SHARDED_OTHERWISE = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD")


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for FSDP1 as one for FSDP2; what FSDP2 cannot be told is left out, with a warning.

    Args:
        config: What a configuration file says. It comes back as it is where it is not about FSDP1.
    """
    section = config.get("fsdp_config") or {}
    if not section:
        return config
    if section.get("fsdp_version", 1) == 2:
        _logger.warning("The configuration is one for FSDP2 already; got fsdp_version=2. It is left as it is.")
        return config
    converted: dict[str, Any] = {}
    for key, value in section.items():
        name = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(name, ConversionStatus):
            gone = "was taken out of FSDP2" if name is ConversionStatus.REMOVED else "is not in FSDP2 yet"
            _logger.warning("%s %s; got %r. It is left out.", key, gone, value)
            continue
        if value in _SHARDED_OTHERWISE:
            _logger.warning("FSDP2 shards over the mesh it is given; got %s=%s. Name the mesh's axes.", key, value)
        converted[name] = ARGUMENT_VALUE_MAPPING.get(key, {}).get(value, value)
    return {**config, "fsdp_config": {**converted, "fsdp_version": 2}}


def load_config(config_file: str) -> dict[str, Any]:
    """Return what a configuration file says.

    Raises:
        ConfigurationError: There is no such file, or it cannot be read.
    """
    found = load(config_file)
    return {} if found is None else found.config


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Turn a configuration file for FSDP1 into one for FSDP2, as the command line asks.

    Raises:
        ConfigurationError: There is no such file, or one would be written over that is not to be.
    """
    config = load_config(args.config_file)
    target = Path(args.output_file or args.config_file).expanduser()
    if target.exists() and not args.overwrite:
        raise ConfigurationError(
            f"The converted configuration needs a place; got {target}, which exists. Name another with --output-file, "
            "or say --overwrite."
        )
    write(convert_config_to_fsdp2(config), target)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", required=True, help="The file to convert.")
    parser.add_argument("--overwrite", action="store_true", help="Write over a file that exists.")
    parser.add_argument("--output_file", default=None, help="Where to write; the file itself with --overwrite.")


TO_FSDP2 = Command("to-fsdp2", "Turn a configuration for FSDP1 into one for FSDP2.", _add_arguments, to_fsdp2_command)


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate to-fsdp2`, as one of `subparsers` where those are given."""
    if subparsers is None:
        return build_parser(TO_FSDP2, "accelerate")
    parser: argparse.ArgumentParser = subparsers.add_parser(TO_FSDP2.name, help=TO_FSDP2.help)
    _add_arguments(parser)
    parser.set_defaults(func=to_fsdp2_command)
    return parser
