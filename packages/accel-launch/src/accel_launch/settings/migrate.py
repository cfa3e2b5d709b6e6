"""Migrates configuration files: old keys and values become current ones.

A file without a schema is one of Accelerate's, of whatever version; what its keys meant is listed here. Files that
accel writes say their schema in their first line, or under the key `schema` in JSON.
"""

from typing import Any

SCHEMA = 1
"""Version of the configuration format that this accel writes and reads; older ones are migrated."""

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_FSDP_KEYS = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
_GONE = {"fp16", "ipex_config", "use_xpu", "num_cpu_threads", "main_cpu_threads"}


def migrate(config: dict[str, Any]) -> None:
    """Update a configuration to the current keys and values, in place."""
    if "fp16" in config:
        config["mixed_precision"] = config.get("mixed_precision", "fp16" if config["fp16"] else "no")
    if config.get("distributed_type") == "TPU":
        config["distributed_type"] = "XLA"
    _dynamo(config)
    _fsdp(config)
    if config.get("num_processes") == -1:  # there is one process per GPU, or --num-processes
        del config["num_processes"]
    for key in _GONE & config.keys():
        del config[key]


def _dynamo(config: dict[str, Any]) -> None:
    old = [key for key in config if key.startswith("dynamo_") and key != "dynamo_config"]
    section = config.get("dynamo_config") or {}
    if old and isinstance(section, dict):  # another one is refused with its line when the keys are checked
        config["dynamo_config"] = {**{key: config.pop(key) for key in old}, **section}


def _fsdp(config: dict[str, Any]) -> None:
    section = config.get("fsdp_config")
    if not isinstance(section, dict):
        return
    for old in [key for key in section if not key.startswith("fsdp_")]:
        section.setdefault(f"fsdp_{old}", section.pop(old))
    for old in _FSDP_KEYS.keys() & section.keys():
        section.setdefault(_FSDP_KEYS[old], section.pop(old))
    chosen, resharded = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
    strategy = section.get(chosen)
    if not isinstance(strategy, (dict, list)) and str(strategy) in map(str, range(1, len(_STRATEGIES) + 1)):
        section[chosen] = _STRATEGIES[int(str(strategy)) - 1]
    # Accelerate stores version 1's strategy under this key. Where it contradicts the other key, it is refused later.
    word = str(section.get(resharded)).upper()
    first = str(section.get("fsdp_version", 1)) == "1" and word in _STRATEGIES
    if first and str(section.setdefault(chosen, word)).upper() == word:
        del section[resharded]
