"""Reject contradictory settings before any process starts."""

import json
import math
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.settings.layout import layout_of
from accel_launch.settings.reading import read_json, shortened
from accel_launch.settings.resolve import Settings

__all__ = ["check_deepspeed_file", "check_script", "check_settings"]


def check_script(settings: Settings) -> None:
    """Refuse a script that cannot be started.

    Args:
        settings: Settings of the run.

    Raises:
        ConfigurationError: There is no such file, it is a folder, or `--module` and `--no-python` are both said.
    """
    if settings["module"] and settings["no_python"]:
        raise ConfigurationError(
            "--module and --no-python contradict each other; got both. Pass --module for a Python module, "
            "--no-python for any other program."
        )
    if settings["module"] or settings["no_python"]:
        return
    path = Path(str(settings.script))
    if path.is_dir() and (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise ConfigurationError(
            f"The script is a folder without a __main__.py; got {str(path)!r}. Name the Python file in it."
        )
    if not path.exists():
        raise ConfigurationError(
            f"There is no such script; got {str(path)!r} in {Path.cwd()}. Check the path; pass -m for a module."
        )


_EXCLUSIVE = (
    ("cpu", "multi_gpu", "tpu"),
    ("use_deepspeed", "use_fsdp"),
    ("use_deepspeed", "use_megatron_lm"),
    ("tpu", "use_deepspeed"),
    ("tpu", "use_fsdp"),
    ("tpu", "use_megatron_lm"),
)


def check_settings(settings: Settings) -> None:
    """Refuse settings that contradict each other.

    Args:
        settings: Settings of the run.

    Raises:
        ConfigurationError: Hardware or engines exclude each other, numbers of processes contradict each other,
            sizes of mesh axes do not multiply to the number of processes, or a DeepSpeed file and the settings say one
            key differently.
    """
    for keys in _EXCLUSIVE:
        said = [key for key in keys if settings[key]]
        if len(said) > 1:
            names = " and ".join(f"{key} from {settings.source(key)}" for key in said)
            raise ConfigurationError(f"These settings exclude each other; got {names}. Leave one out.")
    layout = layout_of(settings)
    if settings["multi_gpu"] and settings.said["multi_gpu"].origin == "flag" and layout.processes < 2:
        raise ConfigurationError(
            f"--multi-gpu needs at least 2 processes; got {layout.processes}. Pass --num-processes, or leave it out."
        )
    if layout.machines > 1 and not settings["mpirun_hostfile"] and not settings["deepspeed_hostfile"]:
        _check_machines(settings)
    if settings["use_parallelism_config"]:
        _check_mesh(settings, layout.processes)
    check_deepspeed_file(settings)


def _check_machines(settings: Settings) -> None:
    if settings["use_deepspeed"] and settings["deepspeed_multinode_launcher"] != "standard":
        return
    wanted = ["main_process_ip", "main_process_port"]
    if settings["rdzv_backend"] == "static" and ":" not in str(settings["nnodes"]):
        wanted.append("machine_rank")
    missing = [f"--{key.replace('_', '-')}" for key in wanted if settings[key] is None]
    if missing:
        raise ConfigurationError(
            f"Several machines have to find one another; got no {' and no '.join(missing)}. Pass it, or start under a "
            "scheduler that sets it (SLURM, MPI, Kubernetes)."
        )


def _check_mesh(settings: Settings, processes: int) -> None:
    sizes = {
        axis: int(settings[f"parallelism_config_{axis}_size"])
        for axis in ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    }
    product = math.prod(sizes.values())
    if processes % product:
        told = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise ConfigurationError(
            f"The mesh does not fit the processes; got {told} = {product} for {processes} processes. Change an "
            "axis, or --num-processes."
        )


_SAME_AS_FILE: dict[str, tuple[str, ...]] = {
    "zero_stage": ("zero_optimization", "stage"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}


def check_deepspeed_file(settings: Settings) -> None:
    """Refuse a DeepSpeed file that says a key differently from the settings.

    Args:
        settings: Settings of the run.

    Raises:
        ConfigurationError: The file is missing or no JSON, or it and a setting that somebody said differ.
    """
    name = settings["deepspeed_config_file"]
    if not settings["use_deepspeed"] or not name:
        return
    config = read_json(Path(str(name)), "The DeepSpeed file")
    for key, path in _SAME_AS_FILE.items():
        there = _lookup(config, path)
        here = settings[key]
        if there not in (None, "auto") and settings.is_set(key) and not _same(there, here):
            raise _conflict(settings, key, here, f"{'.'.join(path)} = {shortened(json.dumps(there))} from {name}")
    if settings.is_set("mixed_precision"):
        for kind in ("fp16", "bf16"):
            enabled = _lookup(config, (kind, "enabled"))
            wanted = settings["mixed_precision"] == kind
            if isinstance(enabled, bool) and enabled != wanted and (enabled or wanted):
                told = f"{kind}.enabled = {json.dumps(enabled)} from {name}"
                raise _conflict(settings, "mixed_precision", settings["mixed_precision"], told)


def _lookup(config: object, path: tuple[str, ...]) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _same(there: object, here: object) -> bool:
    if isinstance(there, (int, float)) and isinstance(here, (int, float)):
        return there == here
    return not isinstance(there, (dict, list)) and str(there).lower() == str(here).lower()


def _conflict(settings: Settings, key: str, here: object, there: str) -> ConfigurationError:
    return ConfigurationError(
        f"{key} is set twice, differently; got {shortened(str(here))} from {settings.source(key)}, and {there}. Set it "
        "in one place, or write `auto` in the DeepSpeed file."
    )
