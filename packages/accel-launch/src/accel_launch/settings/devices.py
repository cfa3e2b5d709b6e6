"""Counts accelerators without torch, from what the driver shows in the file system."""

import os
import subprocess
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from accel_core.options.enums import DistributedType
from accel_core.options.hardware import HARDWARE

_VISIBLE = {row.label.value: row.visible_variable for row in HARDWARE if row.name not in ("cpu", "mps", "xla")}
_GPU = DistributedType.MULTI_GPU.value
_PROC, _DEV = Path("/proc/driver/nvidia/gpus"), Path("/dev")

SEVERAL_DEVICES = tuple(sorted(_VISIBLE, key=lambda label: (label != _GPU, label)))
"""What a configuration file calls several devices of a kind, the most common kind first."""


def visible_variable(label: object) -> str:
    """Return the variable that says which devices a process sees."""
    return _VISIBLE.get(str(label)) or str(_VISIBLE[_GPU])


def count_gpus(environment: Mapping[str, str], gpu_ids: str | None = None) -> int:
    """Count the NVIDIA and AMD GPUs that processes started here would see."""
    found = visible_gpus(environment, gpu_ids)
    # Of several parts of GPUs, CUDA gives a process the first.
    return 1 if found[:1] and found[0].startswith("MIG-") else len(found)


def visible_gpus(environment: Mapping[str, str], gpu_ids: str | None = None) -> list[str]:
    """Return the GPUs that may be given to processes started here, as they are named or by their numbers."""
    present = _present()
    named = gpu_ids if gpu_ids not in (None, "", "all") else environment.get(visible_variable(_GPU))
    if named is None or present == 0:
        return [str(number) for number in range(present)]

    def is_there(word: str) -> bool:
        return word.startswith(("GPU-", "MIG-")) or (word.isdecimal() and int(word) < present)

    return list(takewhile(is_there, map(str.strip, named.split(","))))  # CUDA reads no further than that


def _present() -> int:
    # In a container /proc may list all GPUs of the machine, and of a job all nodes may be there: those that can be
    # opened are its own.
    listed = _PROC.is_dir()
    nodes = sum(os.access(node, os.R_OK | os.W_OK) for node in _DEV.glob("nvidia[0-9]*"))
    if listed and nodes:
        return min(nodes, len(list(_PROC.iterdir())))
    topology = Path("/sys/class/kfd/kfd/topology/nodes")
    if topology.is_dir():
        return sum(_has_compute_units(node) for node in topology.iterdir())
    # Windows' Linux, containers without the driver's folder, and machines that have not used a GPU since they booted.
    if (_DEV / "dxg").exists() or nodes or listed:
        try:
            found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in found.stdout.splitlines())
    return 0


def _has_compute_units(node: Path) -> bool:
    try:
        properties = (node / "properties").read_text()
    except OSError:
        return False
    # CPUs are nodes too, without SIMD units.
    return any(line.startswith("simd_count ") and line.split()[1] != "0" for line in properties.splitlines())
