"""The environment contract: what the launcher's settings become in the environment of the processes."""

import os
from collections.abc import Callable

from accel_core.host.environ import str_to_bool
from accel_launch.settings.layout import layout_of
from accel_launch.settings.resolve import Settings
from accel_launch.settings.table import BY_KEY

__all__ = ["ACTIVE", "child_environment", "engine_environment"]

ACTIVE: dict[str, Callable[[Settings], bool]] = {
    "dynamo": lambda settings: True,
    "deepspeed": lambda settings: bool(settings["use_deepspeed"]),
    "fsdp": lambda settings: bool(settings["use_fsdp"]),
    "megatron": lambda settings: bool(settings["use_megatron_lm"]),
    "parallelism": lambda settings: bool(settings["use_parallelism_config"]),
    "fp8": lambda settings: settings["mixed_precision"] == "fp8",
}
"""Which engines a run uses, by the name in `Setting.engine`."""

_ONLY_WITH = {
    "parallelism_config_cp_comm_strategy": "parallelism_config_cp_size",
    "parallelism_config_sp_seq_length": "parallelism_config_sp_size",
    "parallelism_config_sp_seq_length_is_variable": "parallelism_config_sp_size",
    "parallelism_config_sp_attn_implementation": "parallelism_config_sp_size",
}
_USE = {
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "fsdp": "ACCELERATE_USE_FSDP",
    "megatron": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


def child_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that tell the training side about the settings.

    Args:
        settings: Settings of the run.

    Returns:
        Variables beyond the rank's own (RANK, WORLD_SIZE, …), by name.
    """
    found = {
        "ACCELERATE_USE_CPU": str(bool(settings["cpu"])),
        "ACCELERATE_MIXED_PRECISION": settings["mixed_precision"] or "no",
        "OMP_NUM_THREADS": str(_threads(settings)),
    }
    if settings["cpu"] and layout_of(settings).per_machine == 1:
        found.update({"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"})
    if settings["gpu_ids"] not in (None, "all"):
        found["CUDA_VISIBLE_DEVICES"] = str(settings["gpu_ids"])
    if settings["debug"]:
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if settings["enable_cpu_affinity"]:
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    found.update(engine_environment(settings))
    if settings["use_deepspeed"]:
        path = settings.inherited.get("PYTHONPATH")
        found["PYTHONPATH"] = f"{path}:{os.getcwd()}" if path else os.getcwd()
        found["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(_deepspeed_keys_of_file(settings))
    return found


def engine_environment(settings: Settings) -> dict[str, str]:
    """Return the variables of the engines that the run uses.

    Args:
        settings: Settings of the run.
    """
    found = {name: "true" for engine, name in _USE.items() if ACTIVE[engine](settings)}
    for key, setting in BY_KEY.items():
        if not setting.engine or not ACTIVE[setting.engine](settings):
            continue
        value = settings[key]
        if key == "dynamo_backend":
            value = value or "no"
        if value is None or (key in _ONLY_WITH and int(settings[_ONLY_WITH[key]]) == 1):
            continue
        found[setting.environment] = as_text(key, value)
    if ACTIVE["fp8"](settings):
        for name, value in zip(("FPROP", "DGRAD", "WGRAD"), settings["fp8_override_linear_precision"], strict=True):
            found[f"ACCELERATE_FP8_OVERRIDE_{name}"] = str(value)
    return found


def as_text(key: str, value: object) -> str:
    """Return a value as the processes get it.

    Args:
        key: Name of the setting.
        value: Its value.
    """
    if key == "dynamo_backend":
        return str(value).upper()
    if key in ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"):
        return str(int(str_to_bool(str(value))))
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def _threads(settings: Settings) -> int:
    said = settings["num_cpu_threads_per_process"]
    if said:
        return int(said)
    if not settings["cpu"]:
        return 1
    return max(1, physical_cores() // layout_of(settings).per_machine)


def physical_cores() -> int:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            blocks = file.read().split("\n\n")
    except OSError:
        return os.cpu_count() or 1
    seen = set()
    for block in blocks:
        facts = dict(line.split(":", 1) for line in block.splitlines() if ":" in line)
        facts = {name.strip(): value.strip() for name, value in facts.items()}
        if "core id" in facts:
            seen.add((facts.get("physical id"), facts["core id"]))
    return len(seen) or os.cpu_count() or 1


def _deepspeed_keys_of_file(settings: Settings) -> list[str]:
    said = {
        key
        for key, value in settings.said.items()
        for source in (value, *value.over)
        if source.origin == "file" and BY_KEY[key].path[:1] == ("deepspeed_config",)
    }
    found = [key for key in settings.file_order if key in said]
    mixed = settings.said["mixed_precision"]
    if any(source.origin == "file" for source in (mixed, *mixed.over)):
        found.append("mixed_precision")
    return found
