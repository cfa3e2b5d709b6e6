"""The environment contract: what the launcher's settings become in the environment of the processes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_core.options.engines import Engine, engines, load
from accel_launch.settings.devices import visible_variable
from accel_launch.settings.resolve import Settings
from accel_launch.settings.table import BY_KEY

_MESH = "use_parallelism_config"


def active(engine: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a run uses the engine that settings belong to, by the name in `Setting.engine`."""
    if engine == "fp8":
        return bool(settings["mixed_precision"] == "fp8")
    if engine in ("slurm", "ray"):
        return bool(settings["launcher"] == engine)
    return engine == "dynamo" or bool(settings[_MESH if engine == "parallelism" else engines()[engine].switch])


def switched(settings: Mapping[str, Any]) -> list[Engine]:
    """Return the engines whose switches are on."""
    return [engine for engine in engines().values() if engine.switch and settings[engine.switch]]


def child_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that carry the settings to the training process."""
    found = {
        "ACCELERATE_USE_CPU": str(bool(settings["cpu"])),
        "ACCELERATE_MIXED_PRECISION": settings["mixed_precision"] or "no",
        "OMP_NUM_THREADS": str(_threads(settings)),  # else every rank takes all cores
    }
    if settings["cpu"] and settings.layout.per_machine == 1:
        found.update({"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"})
    if settings["gpu_ids"] not in (None, "all"):
        found[visible_variable(settings.config.get("distributed_type"))] = str(settings["gpu_ids"])
    if settings["debug"]:
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if settings["enable_cpu_affinity"]:
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    found.update(engine_environment(settings))
    for engine in switched(settings):
        if engine.environment:
            found.update(load(engine.environment)(settings))
    return found


def engine_environment(settings: Settings) -> dict[str, str]:
    """Return the variables of the engines that the run uses."""
    keys = [engine.switch for engine in switched(settings)] + [_MESH] * bool(settings[_MESH])
    found = {BY_KEY[key].environment: "true" for key in keys}
    for key, setting in BY_KEY.items():
        option = setting.option
        if option is None or not active(setting.engine, settings):
            continue
        value = option.default if option.always and settings[key] is None else settings[key]
        if value is not None and not (option.only_with and int(settings[option.only_with]) == 1):
            found[setting.environment] = option.write(value)
    if active("fp8", settings):
        for name, value in zip(("FPROP", "DGRAD", "WGRAD"), settings["fp8_override_linear_precision"], strict=True):
            found[f"ACCELERATE_FP8_OVERRIDE_{name}"] = str(value)
    return found


def _threads(settings: Settings) -> int:
    threads = settings["num_cpu_threads_per_process"]
    if threads:
        return int(threads)
    if not settings["cpu"]:  # the work is on the accelerator, as torchrun assumes too
        return 1
    return max(1, physical_cores() // settings.layout.per_machine)


def physical_cores() -> int:
    """Return the number of cores of this machine, counting the threads of one core once."""
    cores = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return len({core.read_text() for core in cores}) or os.cpu_count() or 1
