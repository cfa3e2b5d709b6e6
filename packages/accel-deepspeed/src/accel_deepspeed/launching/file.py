"""DeepSpeed's own JSON file: read before anything starts, compared with the settings, and shown where it decides."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError
from accel_deepspeed.options import PLACES
from accel_launch.settings.reading import read_json, shortened
from accel_launch.settings.resolve import Settings
from accel_launch.settings.resolved import Resolved
from accel_launch.settings.table import BY_KEY

_FORMATS = ("fp16", "bf16")


def deepspeed_file(settings: Settings) -> Mapping[str, Any]:
    """Return what DeepSpeed's JSON file holds; an empty dict if the run names none."""
    name = settings["deepspeed_config_file"]
    if not settings["use_deepspeed"] or name in (None, "", "none"):
        return {}
    found = read_json(Path(str(name)), "The DeepSpeed file")
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"The DeepSpeed file holds keys and values; got {shortened(found)} in {name}. Correct it."
        )
    return found


def values_from_file(settings: Settings) -> dict[str, Resolved]:
    """Return the settings that DeepSpeed's file decides, each with its place in the file."""
    config, name = deepspeed_file(settings), settings["deepspeed_config_file"]
    found = {}
    for key, place in PLACES.items():
        value = _lookup(config, place)
        if value not in (None, "auto"):
            found[key] = Resolved(value, "deepspeed file", f"{name}: {place}")
    formats = [kind for kind in _FORMATS if _lookup(config, f"{kind}.enabled") is True]
    if formats:
        found["mixed_precision"] = Resolved(formats[0], "deepspeed file", f"{name}: {formats[0]}.enabled")
    return found


def keys_beside_file(settings: Settings) -> list[str]:
    """Return the keys of the configuration file's DeepSpeed section in its order, and its mixed precision last."""
    found = [
        key for key in settings.file_order if _in_file(settings, key) and BY_KEY[key].path[:1] == ("deepspeed_config",)
    ]
    return [*found, "mixed_precision"] if _in_file(settings, "mixed_precision") else found


def check(settings: Settings) -> None:
    """Refuse what the settings and DeepSpeed's own file say differently, 8 and 16 bits on a CPU, and no folder."""
    _refuse_differences(settings, deepspeed_file(settings))
    decided = _decided(settings)
    precision = decided["mixed_precision"]
    if settings["cpu"] and precision.value in ("fp16", "fp8"):
        raise ConfigurationError(
            f"DeepSpeed computes in fp32 or bf16 on a CPU; got {precision.value} from {precision.where}, and cpu from "
            f"{settings.source('cpu')}. Use bf16 or no mixed precision, or train on a GPU."
        )
    for what in ("optimizer", "param"):
        device, path = decided[f"offload_{what}_device"], decided[f"offload_{what}_nvme_path"]
        if device.value == "nvme" and path.value in (None, "", "none"):
            raise ConfigurationError(
                f"Offloading to a disk needs a folder; got offload_{what}_device nvme from {device.where}, and no "
                f"offload_{what}_nvme_path. Pass --offload-{what}-nvme-path, or set nvme_path in the DeepSpeed file."
            )


def _decided(settings: Settings) -> dict[str, Resolved]:
    return {**settings.resolved, **values_from_file(settings)}


def environment(settings: Settings) -> dict[str, str]:
    """Return where the processes look for modules, the precision, and which keys accompany DeepSpeed's file."""
    path = settings.inherited.get("PYTHONPATH")
    return {
        "ACCELERATE_MIXED_PRECISION": _decided(settings)["mixed_precision"].value or "no",
        "PYTHONPATH": f"{path}:{os.getcwd()}" if path else os.getcwd(),
        "ACCELERATE_CONFIG_DS_FIELDS": ",".join(keys_beside_file(settings)),
    }


def batch(settings: Settings) -> tuple[int | None, int | None, int | None]:
    """Return the samples of a step and of a process, and the batches of a step, as the file and the settings say."""
    config, steps = deepspeed_file(settings), _whole(settings["gradient_accumulation_steps"])
    if steps is None and config:
        steps = _whole(config.get("gradient_accumulation_steps"))
    return _whole(config.get("train_batch_size")), _whole(config.get("train_micro_batch_size_per_gpu")), steps


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _refuse_differences(settings: Settings, config: Mapping[str, Any]) -> None:
    name = settings["deepspeed_config_file"]
    for key, place in PLACES.items():
        there, here = _lookup(config, place), settings[key]
        if there not in (None, "auto") and settings.is_set(key) and not _same(there, here):
            raise _conflict(settings, key, f"{place} = {shortened(json.dumps(there))} from {name}")
    if not settings.is_set("mixed_precision"):
        return
    for kind in _FORMATS:
        enabled = _lookup(config, f"{kind}.enabled")
        wanted = settings["mixed_precision"] == kind
        if isinstance(enabled, bool) and enabled != wanted:
            raise _conflict(settings, "mixed_precision", f"{kind}.enabled = {json.dumps(enabled)} from {name}")


def _in_file(settings: Settings, key: str) -> str:
    """Return where the configuration file says a setting, empty where it does not."""
    setting = settings.resolved[key]
    return next((source.where for source in (setting, *setting.overridden) if source.origin == "file"), "")


def _lookup(config: object, place: str) -> Any:
    for key in place.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _same(there: object, here: object) -> bool:
    if isinstance(there, (int, float)) and isinstance(here, (int, float)):
        return there == here
    return not isinstance(there, (dict, list)) and str(there).lower() == str(here).lower()


def _conflict(settings: Settings, key: str, there: str) -> ConfigurationError:
    return ConfigurationError(
        f"{key} is set twice, differently; got {shortened(str(settings[key]))} from {settings.source(key)}, and "
        f"{there}. Set it in one place, or to `auto` in the DeepSpeed file."
    )
