"""Migrates configuration files: old keys and values become current ones.

A file without a schema is one of Accelerate's, of whatever version; what its keys meant is listed here. Files that
accel writes say their schema in their first line, or under the key `schema` in JSON.
"""

from typing import Any

__all__ = ["SCHEMA", "migrate"]

SCHEMA = 1
"""Version of the configuration format that this accel writes and reads; older ones are migrated."""

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_FSDP_KEYS = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
_GONE = {"ipex_config", "use_xpu", "num_cpu_threads", "main_cpu_threads"}


def migrate(config: dict[str, Any]) -> list[str]:
    """Update a configuration to the current keys and values, in place; return a description of each change."""
    steps = (_half_precision, _tpu, _dynamo, _fsdp, _gone, _open_number)
    return [change for step in steps for change in step(config)]


def _half_precision(config: dict[str, Any]) -> list[str]:
    if "fp16" not in config:
        return []
    config.setdefault("mixed_precision", "fp16" if config.pop("fp16") else "no")
    config.pop("fp16", None)
    return ["fp16 is now mixed_precision"]


def _tpu(config: dict[str, Any]) -> list[str]:
    if config.get("distributed_type") != "TPU":
        return []
    config["distributed_type"] = "XLA"
    return ["distributed_type TPU is now XLA"]


def _dynamo(config: dict[str, Any]) -> list[str]:
    old = [key for key in config if key.startswith("dynamo_") and key != "dynamo_config"]
    if not old:
        return []
    section = config.get("dynamo_config") or {}
    if not isinstance(section, dict):
        return []  # refused with its line when the keys are checked
    section = dict(section)
    for key in old:
        section.setdefault(key, config.pop(key))
    config["dynamo_config"] = section
    return [f"{', '.join(old)} moved to dynamo_config"]


def _fsdp(config: dict[str, Any]) -> list[str]:
    section = config.get("fsdp_config")
    if not isinstance(section, dict):
        return []
    changes = []
    for old in [key for key in section if not key.startswith("fsdp_")]:
        section.setdefault(f"fsdp_{old}", section.pop(old))
        changes.append(f"fsdp_config.{old} is now fsdp_config.fsdp_{old}")
    for old, new in _FSDP_KEYS.items():
        if old in section:
            section.setdefault(new, section.pop(old))
            changes.append(f"fsdp_config.{old} is now fsdp_config.{new}")
    chosen, resharded = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
    strategy = section.get(chosen)
    if not isinstance(strategy, (dict, list)) and str(strategy) in map(str, range(1, len(_STRATEGIES) + 1)):
        section[chosen] = _STRATEGIES[int(str(strategy)) - 1]
        changes.append(f"{chosen} {strategy} is now {section[chosen]}")
    # Accelerate stores version 1's strategy under this key. Where it contradicts the other key, it is refused later.
    word = str(section.get(resharded)).upper()
    first = str(section.get("fsdp_version", 1)) == "1" and word in _STRATEGIES
    if first and str(section.setdefault(chosen, word)).upper() == word:
        del section[resharded]
        changes.append(f"{resharded} {word} of version 1 is now {chosen}")
    return changes


def _gone(config: dict[str, Any]) -> list[str]:
    found = sorted(_GONE & config.keys())
    for key in found:
        del config[key]
    return [f"{key} no longer has an effect" for key in found]


def _open_number(config: dict[str, Any]) -> list[str]:
    if config.get("num_processes") != -1:
        return []
    del config["num_processes"]
    return ["num_processes -1 had no effect: there is one process per GPU, or --num-processes"]
