"""Reject contradictory settings before any process starts."""

import math
import sys
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.mesh.layout import MESH_AXES
from accel_core.options.engines import load, require_switched
from accel_launch.settings.child import switched
from accel_launch.settings.devices import count_gpus
from accel_launch.settings.layout import counted
from accel_launch.settings.resolve import Settings


def check_script(settings: Settings) -> None:
    """Refuse a script that cannot be started."""
    if settings["module"] and settings["no_python"]:
        raise ConfigurationError(
            "--module and --no-python contradict each other; got both. Pass --module for a Python module, "
            "--no-python for any other program."
        )
    if settings["module"] or settings["no_python"]:
        return
    path = Path(str(settings.script))
    if path.suffix in (".yaml", ".yml", ".json"):
        raise ConfigurationError(
            f"The script is a Python file; got {str(path)!r}. Write --config-file before a configuration, as in "
            f"`accel launch --config-file {path} train.py`."
        )
    if path.is_dir() and (path / "__main__.py").is_file():  # Python runs such a folder
        return
    if path.is_dir():
        raise ConfigurationError(
            f"The script is a folder without a __main__.py; got {str(path)!r}. Name the Python file in it."
        )
    if not path.exists():
        raise ConfigurationError(
            f"The script does not exist; got {str(path)!r} in {Path.cwd()}. Check the path; pass -m for a module."
        )


_HARDWARE = ("cpu", "multi_gpu", "tpu")
_NO_GPU = "Leave it out, or pass --cpu --num-processes 2 to run on the CPU."


def check_settings(settings: Settings) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigurationError: Hardware or engines exclude each other, numbers of processes contradict each other,
            sizes of mesh axes do not multiply to the number of processes, or the engine refuses them.
        MissingDependencyError: The package of an engine is not installed.
    """
    require_switched(settings)
    chosen = switched(settings)
    exclusive = [("tpu", engine.switch) for engine in chosen]
    exclusive += [(engine.switch, other) for engine in chosen for other in engine.excludes]
    for keys in (_HARDWARE, *exclusive):
        set_keys = [key for key in keys if settings[key]]
        if len(set_keys) > 1:
            names = " and ".join(f"{key} from {settings.source(key)}" for key in set_keys)
            raise ConfigurationError(f"These settings exclude each other; got {names}. Leave one out.")
    layout = settings.layout
    # A file's distributed_type sets it too, and may be run on one GPU.
    if settings["multi_gpu"] and settings.resolved["multi_gpu"].origin == "flag" and layout.processes < 2:
        gpus = count_gpus(settings.inherited, settings["gpu_ids"])
        raise ConfigurationError(
            f"--multi-gpu starts at least 2 processes, one per GPU; got {counted(layout.processes, 'process', 'es')}, "
            f"and {counted(gpus or 'no', 'GPU')} here. "
            + ("Pass --num-processes, or leave it out." if gpus else _NO_GPU)
        )
    if layout.machines > 1 and not (settings["mpirun_hostfile"] or settings["launcher"]):
        _check_machines(settings)
    if settings["use_parallelism_config"]:
        _check_mesh(settings, layout.processes)
    for engine in switched(settings):
        if engine.checks:
            load(engine.checks)(settings)


def check_installed(settings: Settings) -> None:
    """Refuse an engine whose library the Python of this process does not have, where the script runs in it.

    A launcher of the engine's own looks for its program instead.
    """
    if settings["no_python"] or _own_launcher(settings) is not None:  # another Python, or another machine's
        return
    for engine in switched(settings):
        if engine.library and (found := engine.presence()).problem:
            raise MissingDependencyError(
                f"A run with {engine.title} needs the library {engine.library}; got {found.version or 'none'} in "
                f"{sys.executable}, and {engine.switch} from {settings.source(engine.switch)}. Run `{found.remedy}`."
            )


def _own_launcher(settings: Settings) -> Any:
    """Return the engine's own launcher if it claims the run."""
    found = (load(engine.launcher)() for engine in switched(settings) if engine.launcher)
    return next((launcher for launcher in found if launcher.claims(settings)), None)


def _check_machines(settings: Settings) -> None:
    wanted = ["main_process_ip", "main_process_port"]
    launcher = _own_launcher(settings)
    if launcher is not None:
        wanted = launcher.needs(settings)
    elif settings["rdzv_backend"] == "static" and ":" not in str(settings["nnodes"]):
        wanted.append("machine_rank")
    missing = [f"--{key.replace('_', '-')}" for key in wanted if settings[key] is None]
    if missing:
        raise ConfigurationError(
            f"A run on several machines is not fully described; got no {' and no '.join(missing)}. Pass what is "
            "missing, or start under a scheduler that sets it (SLURM, MPI, Kubernetes)."
        )


def _check_mesh(settings: Settings, processes: int) -> None:
    sizes = {axis: int(settings[f"parallelism_config_{axis}_size"]) for axis in MESH_AXES}
    product = math.prod(sizes.values())
    if processes % product:
        mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise ConfigurationError(
            f"The mesh does not fit the processes; got {mesh} = {product} for {processes} processes. Change an "
            "axis, or --num-processes."
        )
